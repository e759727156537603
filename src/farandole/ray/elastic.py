# Elastic jobs on Ray: where nodes come from, and the executors under Horovod's names.
# Touches Ray; elastic_job.py does the work.
"""`RayExecutor(min_workers=...)` is the way; `ElasticRayExecutor` is the older one, for scripts that have it."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from farandole.elastic.policy import Limits
from farandole.launch.discovery import DiscoveryError
from farandole.launch.hosts import MOST_SLOTS, Host
from farandole.ray.elastic_job import ActorJob, Make
from farandole.ray.runner import RayExecutor
from farandole.ray.settings import MiniSettings
from farandole.ray.strategy import gpus_of

log = logging.getLogger("farandole.ray")


class RayHostDiscovery:
    """The nodes of the cluster, those that the autoscaler adds included, and how many workers each has room for."""

    fixed = False

    def __init__(self, use_gpu: bool = False, cpus_per_slot: float = 1, gpus_per_slot: float = 1) -> None:
        self.use_gpu = use_gpu
        self.cpus_per_slot = cpus_per_slot
        self.gpus_per_slot = gpus_per_slot

    def find(self) -> list[Host]:
        """By node id."""
        try:
            nodes = [node for node in ray.nodes() if node.get("Alive")]
        except Exception as error:  # Ray's control plane may be away for a while
            raise DiscoveryError(f"Ray does not say which nodes there are: {error}") from None
        return [Host(node["NodeID"], slots) for node in nodes if (slots := self._slots(node["Resources"]))]

    def _slots(self, resources: Mapping[str, float]) -> int:
        slots = resources.get("CPU", 0) // self.cpus_per_slot if self.cpus_per_slot else MOST_SLOTS
        if self.use_gpu:
            slots = min(slots, resources.get("GPU", 0) // self.gpus_per_slot)
        return int(slots)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """By address, as Horovod's class has it."""
        slots = {host.name: host.slots for host in self.find()}
        found: dict[str, int] = {}
        for node in ray.nodes():
            if node["NodeID"] in slots:
                address = node["NodeManagerAddress"]
                found[address] = found.get(address, 0) + slots[node["NodeID"]]
        return found

    def close(self) -> None:
        """There is nothing to end."""


class TestDiscovery(RayHostDiscovery):
    """For trying things out: every so often another choice of nodes, as if the others had gone."""

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
        """Those that are chosen for now."""
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


class _Theirs:
    """Somebody's discovery in Horovod's way: addresses and slots."""

    fixed = False

    def __init__(self, discovery: Any) -> None:
        self._discovery = discovery

    def find(self) -> list[Host]:
        """What it says now."""
        try:
            found = self._discovery.find_available_hosts_and_slots()
        except Exception as error:
            raise DiscoveryError(f"{type(self._discovery).__name__}: {error}") from None
        return [Host(str(name), int(slots)) for name, slots in found.items() if slots]

    def close(self) -> None:
        """There is nothing to end."""


@dataclass
class ElasticParams:
    """A job whose workers come and go."""

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
        """For the coordinator; ValueError when they cannot be kept."""
        if self.min_workers < 1:
            raise ValueError(f"min_workers={self.min_workers}: a job has at least one worker")
        if self.max_workers is not None and self.max_workers < self.min_workers:
            raise ValueError(f"max_workers={self.max_workers} is less than min_workers={self.min_workers}")
        least = self.min_workers
        return Limits(least, least, self.max_workers, self.reset_limit, self.cooldown_range, self.elastic_timeout)


class ElasticAdapter:
    """Makes an elastic job of each function."""

    def __init__(self, params: ElasticParams, settings: Any) -> None:
        self.params = params
        self.settings = settings
        self._executable: tuple[Any, ...] = ()
        self._variables: dict[str, Any] = {}
        self._job: ActorJob | None = None

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, Any] | None = None,
    ) -> None:
        """Notes what each worker will need; workers are started for each function."""
        self._executable = (executable_cls, executable_args, executable_kwargs)
        self._variables = dict(extra_env_vars or {})

    def run(
        self, fn: Callable[[Any], Any], queue: Any = None, turn: Callable[[], None] = lambda: None
    ) -> list[Any] | Exception:
        """What the function returned, by rank, or what went wrong."""
        params = self.params
        gpus = gpus_of(params.use_gpu, params.gpus_per_worker)
        make = Make(params.cpus_per_worker, gpus, self._executable, self._variables, fn, queue)
        self._job = ActorJob(params.limits(), self._discovery(gpus), self.settings, make, log.warning)
        try:
            return self._job.run(turn)
        except Exception as error:
            return error
        finally:
            self._job = None

    def _discovery(self, gpus: float) -> Any:
        theirs = getattr(self.settings, "discovery", None)
        if self.params.override_discovery or theirs is None:
            return RayHostDiscovery(self.params.use_gpu, self.params.cpus_per_worker, gpus or 1)
        return theirs if hasattr(theirs, "find") else _Theirs(theirs)

    def execute(self, fn: Callable[[Any], Any], queue: Any = None) -> list[Any]:
        """There are no references to what workers give that may not exist yet."""
        raise NotImplementedError("run_remote needs workers of a fixed number: use run()")

    def execute_on(self, rank: int, fn: Callable[[Any], Any]) -> list[Any]:
        """Nor is there a worker between two functions."""
        raise NotImplementedError("execute_single and submit need workers of a fixed number: use run()")

    def count(self) -> int:
        """The least number of workers."""
        return self.params.min_workers

    def shutdown(self) -> None:
        """Ends the job that runs."""
        if self._job is not None:
            self._job.close()


class ElasticRayExecutor:
    """The executor that `RayExecutor(min_workers=...)` has replaced."""

    @staticmethod
    def create_settings(
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: float = 600,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        nics: set[str] | None = None,
        min_np: int | None = None,
        max_np: int | None = None,
        **kwargs: Any,
    ) -> MiniSettings:
        """`min_num_proc` and `max_num_proc`: how few and how many workers there may be; **kwargs: more settings."""
        return MiniSettings(
            elastic=True,
            min_num_proc=min_num_proc if min_np is None else min_np,
            max_num_proc=max_num_proc if max_np is None else max_np,
            reset_limit=reset_limit,
            elastic_timeout=elastic_timeout,
            timeout_s=timeout_s,
            ssh_identity_file=ssh_identity_file,
            nics=nics,
            **kwargs,
        )

    def __init__(
        self,
        settings: Any,
        use_gpu: bool = False,
        cpus_per_slot: float = 1,
        gpus_per_slot: float | None = None,
        env_vars: Mapping[str, Any] | None = None,
        override_discovery: bool = True,
    ) -> None:
        if gpus_per_slot is not None and gpus_per_slot < 1:
            raise ValueError(f"gpus_per_slot must be >= 1: Got {gpus_per_slot}.")
        self._env_vars = dict(env_vars or {})
        self._executor = RayExecutor(
            settings,
            min_workers=settings.min_num_proc or 1,
            max_workers=settings.max_num_proc,
            reset_limit=settings.reset_limit,
            cooldown_range=settings.cooldown_range,
            elastic_timeout=settings.elastic_timeout,
            cpus_per_worker=cpus_per_slot,
            use_gpu=use_gpu,
            gpus_per_worker=gpus_per_slot,
            override_discovery=override_discovery,
        )

    def start(self) -> None:
        """Before `run`."""
        self._executor.start(extra_env_vars=self._env_vars)

    def run(self, worker_fn: Callable[[], Any], callbacks: Sequence[Callable[[Any], Any]] | None = None) -> list[Any]:
        """Calls `worker_fn()` on every worker; what they return, by rank."""
        return self._executor.run(worker_fn, callbacks=callbacks)

    def shutdown(self) -> None:
        """Ends what runs."""
        self._executor.shutdown()
