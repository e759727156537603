# The meeting point of ranks that Ray started: the hub, and who stands where.
# Touches the hub of rendezvous/ and its thread.
"""`Coordinator` is Horovod's class of this name: register all workers, then hand each its variables."""

from __future__ import annotations

import contextlib
from typing import Any

from farandole.config import OF_OUR_LAUNCHERS
from farandole.launch import environment
from farandole.launch.slots import Place, places
from farandole.ray.settings import names_of
from farandole.ray.utils import detect_nics, nics_to_env_var
from farandole.rendezvous import interfaces
from farandole.rendezvous.hub import Hub
from farandole.rendezvous.secret import Secret
from farandole.version import package_version

LOCAL = ("LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


def listen_at(nics: Any) -> list[str]:
    """Where a hub in this process listens for the workers of other nodes."""
    return [f"tcp:{address}" for address in interfaces.candidates(names_of(nics))] or ["tcp:127.0.0.1"]


class Coordinator:
    """Knows the workers of a fixed job by rank, and runs their hub. Ray's node, not the machine, counts as the host."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.secret = Secret.create()
        self.places: list[Place] = []
        self._nodes: dict[int, str] = {}
        self._hub: Hub | None = None

    @property
    def world_size(self) -> int:
        """How many workers are registered."""
        return len(self._nodes)

    @property
    def hostnames(self) -> set[str]:
        """The nodes; machines that have the same name stay apart."""
        return set(self._nodes.values())

    @property
    def addresses(self) -> list[str]:
        """Where the hub listens."""
        assert self._hub is not None
        return self._hub.addresses

    def register(self, hostname: str, node_id: str, world_rank: int) -> None:
        """A worker of this rank runs on that node."""
        self._nodes[world_rank] = node_id

    def finalize_registration(self) -> dict[int, dict[str, str]]:
        """For each rank its place on its node and among the nodes."""
        self.places = places([self._nodes[rank] for rank in range(len(self._nodes))])
        return {
            one.rank: {
                name: value for name, value in one.environment().items() if name.removeprefix("HOROVOD_") in LOCAL
            }
            for one in self.places
        }

    def establish_rendezvous(self) -> dict[str, str]:
        """Starts the hub; what all ranks have in common. The secret is not among it: see `variables`."""
        self._hub = Hub(
            self.secret, self.world_size, listen_at(getattr(self.settings, "nics", None)), package_version()
        )
        self._hub.start()
        return {
            "FARANDOLE_RENDEZVOUS": self._hub.address,
            **OF_OUR_LAUNCHERS,
        }

    def variables(self, rank: int, master: tuple[str, int]) -> dict[str, str]:
        """All that tells a rank its place; with `addresses` and `secret` it can join."""
        nics = nics_to_env_var(detect_nics(self.settings))
        timeout = {"FARANDOLE_START_TIMEOUT": f"{max(1.0, float(self.settings.timeout_s)):g}"}
        return {**environment.of_place(self.places[rank], master), **nics, **timeout}

    def absent(self, rank: int, reason: str) -> None:
        """Nobody waits for this rank any more."""
        if self._hub is not None:
            self._hub.absent(rank, reason)

    def close(self) -> None:
        """Ends the hub."""
        hub, self._hub = self._hub, None
        if hub is not None:
            with contextlib.suppress(OSError):
                hub.close()
