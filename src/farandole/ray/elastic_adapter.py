# Elastic jobs on Ray: finds nodes, and is the executor's interface to an elastic job.
# Touches Ray; elastic_job.py does the work.
"""`RayExecutor(min_workers=...)` makes an `ElasticAdapter`. Users may give their own discovery."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from farandole.launch.discovery import Discovery, DiscoveryError, UserDiscovery
from farandole.launch.hosts import MAX_SLOTS, Host
from farandole.ray.elastic_job import ActorJob, ActorSpec
from farandole.ray.strategy import gpus_of
from farandole.rendezvous.elastic.policy import Limits

log = logging.getLogger("farandole.ray")

# A class and its arguments, of which each worker makes an object for the functions of `execute`; or nothing.
Executable = tuple[type | None, Sequence[Any] | None, Mapping[str, Any] | None]


class RayHostDiscovery(Discovery):
    """The nodes of the cluster, also those that the autoscaler adds, and the number of workers that fit on each."""

    def __init__(self, use_gpu: bool = False, cpus_per_slot: float = 1, gpus_per_slot: float = 1) -> None:
        self.use_gpu = use_gpu
        self.cpus_per_slot = cpus_per_slot
        self.gpus_per_slot = gpus_per_slot

    def find(self) -> list[Host]:
        """The nodes, named by node id."""
        try:
            nodes = [node for node in ray.nodes() if node.get("Alive")]
        except Exception as error:  # Ray's control plane may not answer for some time
            raise DiscoveryError(f"Ray cannot list its nodes: {error}") from None
        return [Host(node["NodeID"], slots) for node in nodes if (slots := self._slots(node["Resources"]))]

    def _slots(self, resources: Mapping[str, float]) -> int:
        slots = resources.get("CPU", 0) // self.cpus_per_slot if self.cpus_per_slot else MAX_SLOTS
        if self.use_gpu:
            slots = min(slots, resources.get("GPU", 0) // self.gpus_per_slot)
        return int(slots)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """The slots of each node by its address, as in Horovod's class."""
        slots = {host.name: host.slots for host in self.find()}
        found: dict[str, int] = {}
        for node in ray.nodes():
            if node["NodeID"] in slots:
                address = node["NodeManagerAddress"]
                found[address] = found.get(address, 0) + slots[node["NodeID"]]
        return found


class TestDiscovery(RayHostDiscovery):
    """For tests: it chooses other nodes at regular intervals, as if the remaining nodes were lost."""

    __test__ = False

    def __init__(
        self,
        min_hosts: int,
        max_hosts: int,
        change_frequency_s: float,
        use_gpu: bool = False,
        cpus_per_slot: float = 1,
        gpus_per_slot: float = 1,
        verbose: bool = True,
        _graceful: bool = True,
    ) -> None:
        super().__init__(use_gpu, cpus_per_slot, gpus_per_slot)
        self._bounds = (min_hosts, max_hosts)
        self._seconds = change_frequency_s
        self._verbose = verbose
        self._until = 0.0
        self._chosen: list[str] = []

    def find(self) -> list[Host]:
        """The nodes that are chosen now."""
        found = super().find()
        if time.monotonic() >= self._until:
            self._until = time.monotonic() + self._seconds
            low, high = self._bounds
            count = random.randint(min(low, len(found)), min(high, len(found)))
            kept = [host.name for host in found if host.name in self._chosen]
            new = [host.name for host in found if host.name not in self._chosen]
            random.shuffle(new)
            self._chosen = (kept + new)[:count]
            if self._verbose:
                log.warning("TestDiscovery: %d of %d nodes", len(self._chosen), len(found))
        return [host for host in found if host.name in self._chosen]


@dataclass
class ElasticParams:
    """The parameters of an elastic job."""

    min_workers: int
    max_workers: int | None = None
    reset_limit: int | None = None
    cooldown_range: tuple[int, int] | None = None
    elastic_timeout: float = 600
    override_discovery: bool = True
    cpus_per_worker: float = 1
    use_gpu: bool = False
    gpus_per_worker: float | None = None

    def __post_init__(self) -> None:
        self.limits()

    def limits(self) -> Limits:
        """The limits for the elastic driver; ValueError for wrong ones."""
        if self.min_workers < 1:
            raise ValueError(f"min_workers={self.min_workers}: a job has at least one worker")
        if self.max_workers is not None and self.max_workers < self.min_workers:
            raise ValueError(f"max_workers={self.max_workers} is less than min_workers={self.min_workers}")
        least = self.min_workers
        return Limits(least, least, self.max_workers, self.reset_limit, self.cooldown_range, self.elastic_timeout)


class ElasticAdapter:
    """Runs each function in an elastic job of its own."""

    def __init__(self, params: ElasticParams, settings: Any) -> None:
        self.params = params
        self.settings = settings
        self._executable: Executable = (None, None, None)
        self._variables: dict[str, Any] = {}
        self._job: ActorJob | None = None

    def start(self, executable: Executable, extra_env_vars: Mapping[str, Any]) -> None:
        """Keeps the arguments for the workers, which are started for each function."""
        self._executable = executable
        self._variables = dict(extra_env_vars)

    def run(
        self, fn: Callable[[Any], Any], queue: Any = None, turn: Callable[[], None] = lambda: None
    ) -> list[Any] | Exception:
        """Runs the function. Returns the results by rank, or the error."""
        params = self.params
        gpus = gpus_of(params.use_gpu, params.gpus_per_worker)
        make = ActorSpec(params.cpus_per_worker, gpus, self._executable, self._variables, fn, queue)
        self._job = ActorJob(params.limits(), self._discovery(gpus), self.settings, make, log.warning)
        try:
            return self._job.run(turn)
        except Exception as error:
            return error
        finally:
            self._job = None

    def _discovery(self, gpus: float) -> Any:
        discovery = getattr(self.settings, "discovery", None)
        if self.params.override_discovery or discovery is None:
            return RayHostDiscovery(self.params.use_gpu, self.params.cpus_per_worker, gpus or 1)
        return discovery if hasattr(discovery, "find") else UserDiscovery(discovery)

    def execute(self, fn: Callable[[Any], Any], queue: Any = None) -> list[Any]:
        """Not possible: there can be no references to results of workers that may not exist yet."""
        raise NotImplementedError("run_remote needs workers of a fixed number: use run()")

    def execute_on(self, rank: int, fn: Callable[[Any], Any]) -> list[Any]:
        """Not possible: there are no workers between two functions."""
        raise NotImplementedError("execute_single and submit need workers of a fixed number: use run()")

    def count(self) -> int:
        """The least number of workers."""
        return self.params.min_workers

    def shutdown(self) -> None:
        """Ends the job that runs."""
        if self._job is not None:
            self._job.close()
