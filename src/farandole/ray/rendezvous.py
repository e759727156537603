# The rendezvous of ranks that Ray started: the hub, and the numbers of each rank.
# Touches the hub of rendezvous/ and its thread.
"""`Coordinator` replaces Horovod's class of this name: register all workers, then give each worker its variables."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

from farandole.base.config import OF_OUR_LAUNCHERS
from farandole.base.version import package_version
from farandole.launch import environment
from farandole.launch.slots import RankNumbers, rank_numbers
from farandole.ray.settings import names_of
from farandole.ray.utils import detect_nics, nics_to_env_var
from farandole.rendezvous import interfaces
from farandole.rendezvous.hub import Hub
from farandole.rendezvous.secret import Secret

LOCAL = ("LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


def listen_at(nics: Any) -> list[str]:
    """The addresses at which a hub in this process listens for workers on other nodes."""
    return [f"tcp:{address}" for address in interfaces.candidates(names_of(nics))] or ["tcp:127.0.0.1"]


class Coordinator:
    """Knows the workers of a fixed job by rank, and runs their hub. A host is a node of Ray, not a machine."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.secret = Secret.create()
        self.numbers: list[RankNumbers] = []
        self._nodes: dict[int, str] = {}
        self._names: dict[int, str] = {}
        self._hub: Hub | None = None

    @property
    def world_size(self) -> int:
        """The number of registered workers."""
        return len(self._nodes)

    @property
    def hostnames(self) -> set[str]:
        """The names of the hosts. Ranks are assigned by nodes, because machines may have the same name."""
        return set(self._names.values())

    @property
    def node_id_string(self) -> str:
        """The nodes with their numbers of workers, such as `a:2,b:1`."""
        return ",".join(f"{node}:{count}" for node, count in Counter(self._nodes.values()).items())

    @property
    def addresses(self) -> list[str]:
        """The addresses at which the hub listens."""
        assert self._hub is not None
        return self._hub.addresses

    def register(self, hostname: str, node_id: str, world_rank: int) -> None:
        """Registers the worker of a rank on a node."""
        self._nodes[world_rank], self._names[world_rank] = node_id, hostname

    def finalize_registration(self) -> dict[int, dict[str, str]]:
        """The local and cross numbers of each rank, as variables."""
        self.numbers = rank_numbers([self._nodes[rank] for rank in range(len(self._nodes))])
        return {
            one.rank: {
                name: value for name, value in one.environment().items() if name.removeprefix("HOROVOD_") in LOCAL
            }
            for one in self.numbers
        }

    def establish_rendezvous(self) -> dict[str, str]:
        """Starts the hub. Returns the variables that all ranks share, without the secret: see `variables`."""
        self._hub = Hub(
            self.secret, self.world_size, listen_at(getattr(self.settings, "nics", None)), package_version()
        )
        self._hub.start()
        return {
            "FARANDOLE_RENDEZVOUS": self._hub.address,
            **OF_OUR_LAUNCHERS,
        }

    def variables(self, rank: int, master: tuple[str, int]) -> dict[str, str]:
        """The variables that tell a rank its numbers. With `addresses` and `secret` it can join."""
        nics = nics_to_env_var(detect_nics(self.settings))
        timeout = {"FARANDOLE_START_TIMEOUT": f"{max(1.0, float(self.settings.timeout_s)):g}"}
        return {**environment.of_rank(self.numbers[rank], master), **nics, **timeout}

    def absent(self, rank: int, reason: str) -> None:
        """Tells the hub that this rank will not come."""
        if self._hub is not None:
            self._hub.absent(rank, reason)

    def close(self) -> None:
        """Ends the hub."""
        hub, self._hub = self._hub, None
        if hub is not None:
            with contextlib.suppress(OSError):
                hub.close()
