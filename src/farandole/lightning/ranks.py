# The common part of the strategies for Trainer and Fabric: this rank's numbers and device, operations between ranks.
# Touches torch.distributed, world, and the files environment, launcher, packages and reduction of this folder.
"""torch.distributed also runs, on our backend, because metrics and callbacks of other libraries use it."""

from __future__ import annotations

import contextlib
import difflib
import inspect
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from ..base.named import module_of
from ..torch.distributed.rendezvous import meet
from ..torch.functions import broadcast_parameters
from ..world.basics import init
from ..world.runtime import runtime
from .environment import launched
from .launcher import ElasticRestart, ProcessStarter
from .packages import fabric_of
from .reduction import Reducer, ReductionOptions

TIMEOUT = timedelta(minutes=30)  # the same as torch's default
_MEANS = ("mean", "avg")


class Ranks:
    """A base for classes that also derive from Lightning's ParallelStrategy."""

    tree: str
    environment_class: Any  # the class for the package's Fabric
    accelerator: Any
    is_distributed = True  # without it Lightning gives every rank all of the data, and `sync_dist` does nothing
    _launcher: Any = None

    def _begin(self, reduction_options: dict[str, Any], unknown: dict[str, Any]) -> None:
        """The last step of a constructor. `unknown`: unknown options, which are an error."""
        if unknown:
            known = [
                name for name in inspect.signature(type(self).__init__).parameters if name not in ("self", "unknown")
            ]
            name = next(iter(unknown))
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; its options are {', '.join(known)}"
            raise TypeError(f"{type(self).__name__} has no option {name!r}{hint}")
        self._reducer = Reducer(ReductionOptions(**reduction_options))
        self._world: Any = None  # the world of torch.distributed's process group
        self.cluster_environment = self.environment_class()

    # --- ranks and devices -------------------------------------------------------------------------------------------

    @property
    def num_nodes(self) -> int:
        """The number of hosts."""
        return runtime.config.cross_size if runtime.initialized else 1

    @num_nodes.setter
    def num_nodes(self, value: int) -> None:
        """Ignores the value of the script: the launcher decides."""

    @property
    def num_processes(self) -> int:
        """The number of ranks on this host."""
        return len(self.parallel_devices or [])

    @property
    def parallel_devices(self) -> Any:
        """A device for each rank of this host, by local rank."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: Any) -> None:
        self._parallel_devices = devices

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        devices = self.parallel_devices
        assert devices, "Lightning has not set the devices of this strategy"
        local_rank = runtime.config.local_rank if runtime.initialized else 0
        device: torch.device = devices[local_rank % len(devices)]
        return device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Into how many parts the data is split, and which of them this rank gets."""
        environment: Any = self.cluster_environment
        return {"num_replicas": environment.world_size(), "rank": environment.global_rank()}

    def _configure_launcher(self) -> None:
        """Starts N ranks for `devices=N`, but none if a launcher has started this process."""
        if launched():
            init()
            self.parallel_devices = devices_of(self.parallel_devices, runtime.config.local_size)
            self._tell_rank()
            self._launcher = ElasticRestart() if runtime.config.elastic else None
        elif len(self.parallel_devices or []) > 1:
            self.cluster_environment.ranks_to_start = len(self.parallel_devices)
            self._launcher = ProcessStarter(len(self.parallel_devices), self.tree)

    def _tell_rank(self) -> None:
        """Sets the rank in Lightning's utilities, which decide by it who may print and write."""
        rank = self.cluster_environment.global_rank()
        shared = module_of("lightning_utilities.core.rank_zero").rank_zero_only
        shared.rank = module_of(f"{fabric_of(self.tree)}.utilities.rank_zero").rank_zero_only.rank = rank

    def setup_environment(self) -> None:
        """Joins the job. It is called first in each rank."""
        init()
        if launched():
            self.parallel_devices = devices_of(self.parallel_devices, runtime.config.local_size)
        self._tell_rank()
        base: Any = super()
        base.setup_environment()
        module_of(f"{fabric_of(self.tree)}.utilities.seed").reset_seed()
        self._join_torch()

    def _join_torch(self) -> None:
        world = runtime.world
        if self._world is not None and self._world is not world and dist.is_initialized():
            with contextlib.suppress(Exception):  # ranks of the old process group may have ended
                dist.destroy_process_group()
        self._world = world
        if dist.is_initialized() or not dist.is_available():
            return
        store, rank, size = next(meet(TIMEOUT))
        dist.init_process_group("farandole", store=store, rank=rank, world_size=size, timeout=TIMEOUT)

    # --- between ranks -----------------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        """Waits until all ranks have called it."""
        if dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns the object of rank `src` on all ranks."""
        if not dist.is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def _reduced(self, tensor: Any, group: Any, reduce_op: Any) -> Any:
        """Reduces a tensor in place, as Lightning's own strategies do. Returns other values unchanged."""
        if not isinstance(tensor, torch.Tensor) or not dist.is_initialized():
            return tensor
        text = str(reduce_op or "mean").lower().rpartition(".")[2]
        average = text in _MEANS
        if not average and not hasattr(dist.ReduceOp, text.upper()):
            raise ValueError(
                f"reduce_op={reduce_op!r}: expected mean, sum, max, min, product or one of torch's ReduceOp"
            )
        dist.all_reduce(tensor, dist.ReduceOp.SUM if average else getattr(dist.ReduceOp, text.upper()), group)
        if average:
            tensor.copy_(tensor / dist.get_world_size(group))
        return tensor

    def __getstate__(self) -> dict[str, Any]:
        """The state for ranks that we start, without the objects that belong to this process."""
        base: Any = super()
        state = base.__getstate__() if hasattr(base, "__getstate__") else dict(vars(self))
        state = dict(state) if isinstance(state, dict) else dict(vars(self))
        return {**state, "_launcher": None, "_world": None, "_reducer": Reducer(self._reducer.options)}


def devices_of(devices: Any, local_size: int) -> list[torch.device]:
    """A device for each rank of the host. `devices=1`, as in Horovod, means one device for each rank.

    >>> devices_of([torch.device("cpu")], 2)
    [device(type='cpu'), device(type='cpu')]
    """
    known = list(devices)
    if len(known) >= local_size:
        return known
    kind = known[0].type
    if kind == "cpu":
        return [torch.device("cpu")] * local_size
    count = torch.cuda.device_count() if kind == "cuda" else len(known)
    return [torch.device(kind, index % count) for index in range(local_size)]


def broadcast_parameters_from_rank_0(module: torch.nn.Module) -> None:
    """Sends the parameters and buffers of rank 0 to every rank."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    whole = {name: tensor for name, tensor in tensors.items() if not torch.nn.parameter.is_lazy(tensor)}
    broadcast_parameters(whole, 0)


def broadcast_buffers_from_rank_0(module: torch.nn.Module) -> None:
    """Sends the buffers of rank 0 to every rank, such as the averages of batch normalisation."""
    buffers = dict(module.named_buffers())
    if buffers:
        broadcast_parameters(buffers, 0)
