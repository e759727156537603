# Tells Lightning the rank of this process, and whether a launcher has started it.
# Touches the rooms base, clusters and world.
"""`Environment` implements Lightning's interface for the job of this process."""

from __future__ import annotations

from typing import Any

from ..base.config import Config, environment
from ..clusters import detect
from ..world.basics import init
from ..world.runtime import runtime


def launched() -> bool:
    """Whether a launcher (ours or another) has started this process as a rank. Then no more ranks are started."""
    if runtime.initialized and runtime.size > 1:
        return True
    config = Config.from_environment()
    return config.rendezvous is not None or detect(environment(), config.launcher) is not None


class Environment:
    """The job that `farandole run`, another launcher or this process itself has started.

    Use it for Lightning's own strategies on several hosts: `Trainer(plugins=[FarandoleEnvironment()])`.
    """

    def __init__(self) -> None:
        if launched():
            init()

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return environment().get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        return int(environment().get("MASTER_PORT", "0"))

    @staticmethod
    def detect() -> bool:
        """Whether this process is a rank of a job."""
        return launched()

    # The ranks that this process will start; before and after them Lightning asks how many there are.
    ranks_to_start = 1

    def _of_world(self, name: str, alone: int) -> int:
        return int(getattr(runtime.config, name)) if runtime.initialized else alone

    def world_size(self) -> int:
        """The number of ranks."""
        return self._of_world("size", self.ranks_to_start)

    def set_world_size(self, size: int) -> None:
        """Does nothing: the job has its size already."""

    def global_rank(self) -> int:
        """This rank's number."""
        return self._of_world("rank", 0)

    def set_global_rank(self, rank: int) -> None:
        """Does nothing: this process has its rank already."""

    def local_rank(self) -> int:
        """This rank's number on its host."""
        return self._of_world("local_rank", 0)

    def node_rank(self) -> int:
        """The number of this host."""
        return self._of_world("cross_rank", 0)

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Does nothing: the launcher decides, and `devices` and `num_nodes` are ignored."""

    def teardown(self) -> None:
        """Does nothing: the ranks may run another fit."""

    def __reduce__(self) -> Any:
        return type(self), ()
