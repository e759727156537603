# "cpu:farandole,cuda:nccl": a group that uses another backend of torch for CUDA tensors.
# Touches torch; the room bindings.private; the file group.
"""The device of the first tensor decides which backend runs an operation."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from ...bindings.private.torch_names import backend_of, coalesce, group_around, set_timeout
from .group import Group

OPERATIONS = [
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "broadcast",
    "allgather",
    "allgather_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "gather",
    "scatter",
    "alltoall",
    "all_to_all_single",
    "send",
    "recv",
    "recv_anysource",
    "_allgather_base",
    "allgather_into_tensor_coalesced",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "alltoall_base",
]


class Composed(Group):
    """A group that also has a process group of torch."""

    cuda_group: Any  # a torch ProcessGroup with one backend, for CUDA

    def get_backend(self, device: Any) -> Any:
        """Each type of device has its own backend."""
        return backend_of(self.cuda_group, device) if torch.device(device).type == "cuda" else self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device("cuda")]

    def _start_coalescing(self, device: Any = None) -> None:
        if device is not None and device.type == "cuda":
            coalesce(self.cuda_group, device, begin=True)
            return
        super()._start_coalescing(device)

    def _end_coalescing(self, device: Any = None) -> Any:
        if device is not None and device.type == "cuda":
            return coalesce(self.cuda_group, device, begin=False)
        return super()._end_coalescing(device)

    def split_group(self, *args: Any, **kwargs: Any) -> Any:
        """RuntimeError: a group with two backends cannot be split."""
        raise RuntimeError("a group of several backends cannot be split; use new_group")

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        self.cuda_group.set_timeout(timeout)

    def abort(self) -> None:
        self.cuda_group.abort()
        super().abort()

    def shutdown(self) -> None:
        if not self._left:
            self.cuda_group.shutdown()
        super().shutdown()


def _on_cuda(value: Any) -> bool:
    while isinstance(value, list | tuple) and value:
        value = value[0]
    return isinstance(value, torch.Tensor) and value.is_cuda


def _by_device(name: str, near: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Composed, *args: Any, **kwargs: Any) -> Any:
        # The first argument may be an empty list: the outputs of a rank that gets nothing.
        if any(map(_on_cuda, args[:2])) or any(map(_on_cuda, kwargs.values())):
            return getattr(self.cuda_group, name)(*args, **kwargs)
        return near(self, *args, **kwargs)

    call.__name__, call.__doc__ = name, near.__doc__
    return call


for _name in OPERATIONS:
    setattr(Composed, _name, _by_device(_name, getattr(Group, _name)))


def compose(create: Callable[[Any, type[Composed]], Any], cuda: str, opts: Any, options: Any) -> Composed:
    """Makes the group with `create`, and the other backend in the way that torch does."""
    if cuda == "nccl" and not dist.is_nccl_available():
        raise RuntimeError("Distributed package doesn't have NCCL built in")
    store = dist.PrefixStore("cuda/", opts.store)
    if cuda == "nccl":
        chosen = options if options is not None else dist.ProcessGroupNCCL.Options()
        set_timeout(chosen, opts.timeout)
        chosen.global_ranks_in_group = list(opts.global_ranks_in_group)
        chosen.group_name = opts.group_id
        made: Any = dist.ProcessGroupNCCL(store, opts.group_rank, opts.group_size, chosen)
        kind = dist.ProcessGroup.BackendType.NCCL
    else:
        made = dist.ProcessGroupGloo(store, opts.group_rank, opts.group_size, timeout=opts.timeout)
        kind = dist.ProcessGroup.BackendType.GLOO
    cuda_group: Any = dist.ProcessGroup(store, opts.group_rank, opts.group_size)
    group_around(made, kind, torch.device("cuda"), f"{opts.group_id}/{cuda}", cuda_group)
    group: Composed = create(opts, Composed)
    group.cuda_group = cuda_group
    return group
