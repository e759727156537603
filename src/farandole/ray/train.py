# `HorovodTrainer` for Ray Train V2, and the backend that turns Train's workers into ranks.
# Touches Ray Train; the hub runs in Train's controller.
"""In Ray 2.60 the class `ray.train.horovod.HorovodTrainer` only raises an error. This is a working one."""

from __future__ import annotations

import contextlib
import copy
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import ray
from ray.train import RunConfig, UserCallback
from ray.train.backend import Backend, BackendConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from farandole.base import tested
from farandole.bindings.compat import Timeout, make_secret_key
from farandole.bindings.private import ray_names
from farandole.launch import calls
from farandole.ray.rendezvous import Coordinator
from farandole.ray.settings import write_key
from farandole.ray.strategy import await_room
from farandole.ray.train_elastic import ElasticBackend, ElasticRank
from farandole.ray.train_rank import LEAVE_SECONDS, Rank
from farandole.ray.worker import location, take_place
from farandole.world import basics

SPACE = b"farandole"  # the namespace in Ray's key-value store

log = logging.getLogger("farandole.ray")


@dataclass
class HorovodConfig(BackendConfig):
    """The rendezvous of a HorovodTrainer's workers. The ssh settings have no effect: Ray starts the workers."""

    nics: set[str] | None = None
    verbose: int = 1
    key: Any = field(default=None, repr=False)
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    ssh_str: str | None = field(default=None, repr=False)
    timeout_s: float = 300
    placement_group_timeout_s: float = 100  # how long we wait until the cluster is large enough
    # Not in Horovod: with at least so many workers training continues while Ray replaces a lost worker.
    min_workers: int | None = None
    elastic_timeout: float = 600

    def __post_init__(self) -> None:
        write_key(self.ssh_identity_file, self.ssh_str)
        if self.key is None:
            self.key = make_secret_key()

    @property
    def start_timeout(self) -> Timeout:
        """A timeout that starts now."""
        return Timeout(self.timeout_s)

    @property
    def backend_cls(self) -> type:
        """For Ray Train."""
        if self.min_workers is None:
            return HorovodBackend
        return ElasticBackend

    @property
    def train_func_context(self) -> Callable[[], Any]:
        """For Ray Train."""
        if self.min_workers is None:
            return Rank
        return ElasticRank


class HorovodBackend(Backend):
    """Runs in Train's controller. It starts again whenever Train restarts its workers."""

    share_cuda_visible_devices = True

    def __init__(self) -> None:
        self._coordinator: Coordinator | None = None

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Gives the workers their numbers; then `init()` in the train function can join."""
        self._close()
        found = worker_group.execute(location)
        coordinator = self._coordinator = Coordinator(backend_config)
        for rank, host in enumerate(found):
            coordinator.register(host.hostname, host.node, rank)
        coordinator.finalize_registration()
        coordinator.establish_rendezvous()
        nodes = list(dict.fromkeys(host.node for host in found))
        master = (found[0].address, found[0].port)
        ready = []
        for rank, host in enumerate(found):
            variables = {**coordinator.variables(rank, master), "NODE_RANK": str(nodes.index(host.node))}
            arguments = (variables, coordinator.addresses, coordinator.secret.key)
            ready.append(worker_group.execute_single_async(rank, take_place, *arguments))
        ray.get(ready)

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """Makes the workers leave, if they still can."""
        with contextlib.suppress(Exception):
            ray.get(worker_group.execute_async(basics.shutdown), timeout=LEAVE_SECONDS)
        self._close()

    def _close(self) -> None:
        coordinator, self._coordinator = self._coordinator, None
        if coordinator is not None:
            coordinator.close()


class _LastReport(UserCallback):
    """Keeps the last report of rank 0 for `result.metrics`. Ray keeps only reports with a checkpoint."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        """Ray calls it in the controller."""
        ray_names.store_value(self._key, calls.pack(metrics[0]), SPACE)


class HorovodTrainer(DataParallelTrainer):
    """Data-parallel training on Ray whose train function calls `hvd.init()` and uses Farandole.

    The arguments are those of Ray's class; see docs/ray.md.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[[], Any] | Callable[[dict[str, Any]], Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        horovod_config: Any = None,
        scaling_config: Any = None,
        dataset_config: Any = None,
        run_config: Any = None,
        datasets: Mapping[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
        resume_from_checkpoint: Any = None,
        validation_config: Any = None,
    ) -> None:
        tested.warn_about_newer(["ray"])
        self._key = b"report-" + secrets.token_hex(16).encode()
        run_config = copy.copy(run_config) if run_config is not None else RunConfig()
        run_config.callbacks = [*(getattr(run_config, "callbacks", None) or []), _LastReport(self._key)]
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=_ours(horovod_config, scaling_config),
            scaling_config=scaling_config,
            dataset_config=dataset_config,
            run_config=run_config,
            datasets=None if datasets is None else dict(datasets),
            metadata=metadata,
            resume_from_checkpoint=resume_from_checkpoint,
            validation_config=validation_config,
        )

    def fit(self) -> Any:
        """Trains. `result.metrics` is the last report of rank 0, with a checkpoint or without.

        Raises TimeoutError if the cluster is too small for the workers for `placement_group_timeout_s`.
        """
        self._await_room()
        try:
            result = super().fit()
            last = ray_names.stored_value(self._key, SPACE) if ray.is_initialized() else None
            if last is not None:
                result.metrics = calls.unpack(last)
            return result
        finally:
            if ray.is_initialized():
                ray_names.delete_value(self._key, SPACE)

    def _await_room(self) -> None:
        """Waits until the cluster is large enough. Ray Train itself would request missing resources forever."""
        scaling: Any = self.scaling_config  # Ray's annotation names the class of Train V1
        one = {name: round(count / scaling.max_workers, 4) for name, count in scaling.total_resources.items() if count}
        if one:  # it is empty in Ray's local mode, which has no workers
            if not ray.is_initialized():
                ray.init()  # Train would do it later
            config: Any = self.backend_config  # a HorovodConfig
            await_room(one, scaling.min_workers, scaling.placement_strategy, config.placement_group_timeout_s)


def prepare_trainer(trainer: Any) -> Any:
    """Like the function of ray.train.lightning, but also accepts a Lightning Trainer with our strategy."""
    from farandole.lightning.ranks import Ranks  # imports torch, which is needed only with Lightning

    if isinstance(trainer.strategy, Ranks):
        return trainer
    from ray.train.lightning import prepare_trainer as theirs

    return theirs(trainer)


def _ours(config: Any, scaling: Any) -> HorovodConfig:
    """The configuration as our class. A range of workers makes it elastic."""
    known = {one.name: getattr(config, one.name) for one in fields(HorovodConfig) if hasattr(config, one.name)}
    own = HorovodConfig(**known)
    if own.min_workers is None and getattr(scaling, "elasticity_enabled", False):
        own.min_workers = scaling.min_workers
    return own
