# What the strategies for Trainer and Fabric share: this rank's place and device, and operations between ranks.
# Touches torch.distributed, the runtime below, environment, launcher and trees.
"""torch.distributed runs on our backend beside the gradients, so that metrics and callbacks of others find it."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from ..autoload import announce
from ..runtime import init, runtime
from ..torch.distributed.rendezvous import meet
from ..torch.functions import broadcast_parameters
from . import trees
from .environment import launched
from .launcher import Again, OwnRanks
from .reduction import Reducer, Terms

TIMEOUT = timedelta(minutes=30)  # torch's own
_MEANS = ("mean", "avg")


class Ranks:
    """For a class that derives from Lightning's ParallelStrategy as well."""

    tree: str
    accelerator: Any
    is_distributed = True  # without it Lightning gives every rank all of the data, and `sync_dist` does nothing
    _launcher: Any = None

    def _begin(self, terms: dict[str, Any], unknown: dict[str, Any]) -> None:
        """The end of a constructor: `unknown` is what nobody knows."""
        if unknown:
            known = [
                name for name in inspect.signature(type(self).__init__).parameters if name not in ("self", "unknown")
            ]
            name = next(iter(unknown))
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(known)}"
            raise TypeError(f"{type(self).__name__} has no option {name!r}{hint}")
        self._reducer = Reducer(Terms(**terms))
        self._world: Any = None  # the one that torch.distributed's group belongs to
        self.cluster_environment = trees.build(trees.fabric_of(self.tree), "FarandoleEnvironment")()

    # --- who and where -----------------------------------------------------------------------------------------------

    @property
    def num_nodes(self) -> int:
        """The number of hosts."""
        return runtime.world.config.cross_size if runtime.initialized else 1

    @num_nodes.setter
    def num_nodes(self, value: int) -> None:
        """Lightning says what the script said; the launcher knows better."""

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
        assert devices, "Lightning has not said which devices there are"
        place = runtime.world.config.local_rank if runtime.initialized else 0
        device: torch.device = devices[place % len(devices)]
        return device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Who takes which share of the data."""
        environment: Any = self.cluster_environment
        return {"num_replicas": environment.world_size(), "rank": environment.global_rank()}

    def _configure_launcher(self) -> None:
        """Under a launcher nobody starts processes; without one, `devices=N` is N ranks that are ours to start."""
        if launched():
            init()
            self.parallel_devices = devices_of(self.parallel_devices, runtime.world.config.local_size)
            self._tell_rank()
            self._launcher = Again() if runtime.world.config.elastic else None
        elif len(self.parallel_devices or []) > 1:
            self._launcher = OwnRanks(len(self.parallel_devices), self.tree)

    def _tell_rank(self) -> None:
        """Who may print and write: Lightning looks at this in many places."""
        rank = self.cluster_environment.global_rank()
        shared = importlib.import_module("lightning_utilities.core.rank_zero").rank_zero_only
        shared.rank = importlib.import_module(
            f"{trees.fabric_of(self.tree)}.utilities.rank_zero"
        ).rank_zero_only.rank = rank

    def setup_environment(self) -> None:
        """Joins the job; called in each rank before anything else."""
        init()
        if launched():
            self.parallel_devices = devices_of(self.parallel_devices, runtime.world.config.local_size)
        self._tell_rank()
        base: Any = super()
        base.setup_environment()
        importlib.import_module(f"{trees.fabric_of(self.tree)}.utilities.seed").reset_seed()
        self._join_torch()

    def _join_torch(self) -> None:
        world = runtime.world
        if self._world is not None and self._world is not world and dist.is_initialized():
            with contextlib.suppress(Exception):  # of ranks that have come and gone since
                dist.destroy_process_group()
        self._world = world
        if dist.is_initialized() or not dist.is_available():
            return
        announce()
        store, rank, size = next(meet(TIMEOUT))
        dist.init_process_group("farandole", store=store, rank=rank, world_size=size, timeout=TIMEOUT)

    # --- between ranks -----------------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        """Nobody goes on before everybody has come."""
        if dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of one rank, on all of them."""
        if not dist.is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def _reduced(self, tensor: Any, group: Any, reduce_op: Any) -> Any:
        """In place, as Lightning's own strategies do it; what is no tensor stays as it is."""
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
        """For ranks of our own: what belongs to this process stays here."""
        base: Any = super()
        state = base.__getstate__() if hasattr(base, "__getstate__") else dict(vars(self))
        state = dict(state) if isinstance(state, dict) else dict(vars(self))
        return {**state, "_launcher": None, "_world": None, "_reducer": Reducer(self._reducer._terms)}


def devices_of(devices: Any, local_size: int) -> list[torch.device]:
    """A device for each of the host's ranks; `devices=1`, as Horovod's users write, means one for each of them.

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
    return [torch.device(kind, place % count) for place in range(local_size)]


def equalize(module: torch.nn.Module) -> None:
    """Gives every rank rank 0's parameters and buffers."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    whole = {name: tensor for name, tensor in tensors.items() if not torch.nn.parameter.is_lazy(tensor)}
    broadcast_parameters(whole, 0)


def equalize_buffers(module: torch.nn.Module) -> None:
    """Gives every rank rank 0's buffers, such as the averages of batch normalisation."""
    buffers = dict(module.named_buffers())
    if buffers:
        broadcast_parameters(buffers, 0)
