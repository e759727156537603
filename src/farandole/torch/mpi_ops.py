# Names that other programs import from horovod.torch.mpi_ops: the operations, and internal names.
# Touches torch, compat, ops, autograd and memory; the package's public names for the rest.
"""Thin adapters: every call ends in the operations of this package."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch

from .. import torch as _common
from ..bindings.compat import HorovodBasics, check_installed_version, gpu_available, num_rank_is_power_2
from ..operations.pending import chosen_op as handle_average_backwards_compatibility
from ..world.groups import ProcessSet
from ..world.runtime import runtime
from . import autograd, memory, ops
from .compression import Compression

__all__ = [
    *(name for name in _common.__all__ if name != "elastic"),
    "HorovodAllgather",
    "HorovodAllreduce",
    "HorovodAlltoall",
    "HorovodBroadcast",
    "HorovodGroupedAllgather",
    "HorovodGroupedAllreduce",
    "HorovodGroupedReducescatter",
    "HorovodReducescatter",
    "check_installed_version",
    "gpu_available",
    "handle_average_backwards_compatibility",
    "num_rank_is_power_2",
]

# The same objects under this module's name, so that programs can import from either.
globals().update({name: getattr(_common, name) for name in _common.__all__})

_basics = HorovodBasics()
_NULL = ""  # as a name


class _Handles(MutableMapping[int, Any]):
    """The pending operations by handle, with the tensors that were stored for them."""

    def __init__(self) -> None:
        self._noted: dict[int, Any] = {}

    def _known(self) -> set[int]:
        return {*self._noted, *(runtime.world.handles if runtime.initialized else ())}

    def __getitem__(self, handle: int) -> Any:
        if handle not in self._known():
            raise KeyError(handle)
        return self._noted.get(handle, ())

    def __setitem__(self, handle: int, tensors: Any) -> None:
        self._noted[handle] = tensors

    def __delitem__(self, handle: int) -> None:
        """Forgets the tensors; the operation stays until it is synchronized."""
        self._noted.pop(handle, None)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._known()))

    def __len__(self) -> int:
        return len(self._known())


_handle_map = _Handles()


def synchronize(handle: int) -> Any:
    """Waits for an `_async` operation and gives its result."""
    try:
        return ops.synchronize(handle)
    finally:
        _handle_map._noted.pop(handle, None)


def _check_function(function_factory: Callable[[torch.Tensor], str], tensor: torch.Tensor) -> str:
    """The factory's name for an operation on this tensor. ValueError for tensors that cannot be sent."""
    memory.type_of(tensor)
    return function_factory(tensor)


def _factory(operation: str) -> Callable[[torch.Tensor], str]:
    def named(tensor: torch.Tensor) -> str:
        return f"horovod_torch_{operation}_async_{tensor.type().replace('.', '_')}"

    return named


_allreduce_function_factory = _factory("allreduce")
_grouped_allreduce_function_factory = _factory("grouped_allreduce")
_allgather_function_factory = _factory("allgather")
_grouped_allgather_function_factory = _factory("grouped_allgather")
_broadcast_function_factory = _factory("broadcast")
_alltoall_function_factory = _factory("alltoall")
_reducescatter_function_factory = _factory("reducescatter")
_grouped_reducescatter_function_factory = _factory("grouped_reducescatter")


def _allreduce_async(
    tensor: torch.Tensor, output: torch.Tensor, name: str | None, op: Any, prescale_factor: float,
    postscale_factor: float, process_set: ProcessSet,
) -> int:  # fmt: skip
    """Begins an allreduce of `tensor` into `output`, which may be the same."""
    if output is not tensor:
        output.copy_(tensor)
    handle = ops.allreduce_async_(output, None, name, op, prescale_factor, postscale_factor, process_set)
    _handle_map[handle] = (tensor, output)
    return handle


def _grouped_allreduce_async(
    tensors: Any, outputs: Any, name: str | None, op: Any, prescale_factor: float, postscale_factor: float,
    process_set: ProcessSet,
) -> int:  # fmt: skip
    """Begins allreduces of `tensors` into `outputs` (which may be the same), which become ready together."""
    for tensor, output in zip(tensors, outputs, strict=True):
        if output is not tensor:
            output.copy_(tensor)
    handle = ops.grouped_allreduce_async_(outputs, None, name, op, prescale_factor, postscale_factor, process_set)
    _handle_map[handle] = (tuple(tensors), tuple(outputs))
    return handle


def _broadcast_async(
    tensor: torch.Tensor, output: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
) -> int:
    """Begins a broadcast of the root's `tensor` into `output`, which may be the same."""
    if output is not tensor:
        output.copy_(tensor)
    handle = ops.broadcast_async_(output, root_rank, name, process_set)
    _handle_map[handle] = (tensor, output)
    return handle


# --- the operations that autograd differentiates, called as Horovod's classes are ------------------------------------


class HorovodAllreduce:
    """`apply(tensor, average, name, op, prescale_factor, postscale_factor, process_set)`."""

    @staticmethod
    def apply(
        tensor: Any, average: Any, name: Any, op: Any, prescale: float, postscale: float, process_set: Any
    ) -> Any:
        return autograd.allreduce(tensor, average, name, Compression.none, op, prescale, postscale, process_set)


class HorovodGroupedAllreduce:
    """`apply(average, name, op, prescale_factor, postscale_factor, process_set, *tensors)`."""

    @staticmethod
    def apply(
        average: Any, name: Any, op: Any, prescale: float, postscale: float, process_set: Any, *tensors: Any
    ) -> Any:
        return autograd.grouped_allreduce(
            tensors, average, name, Compression.none, op, prescale, postscale, process_set
        )


class HorovodAllgather:
    """`apply(tensor, name, process_set)`."""

    apply = staticmethod(autograd.allgather)


class HorovodGroupedAllgather:
    """`apply(name, process_set, *tensors)`."""

    @staticmethod
    def apply(name: Any, process_set: Any, *tensors: Any) -> Any:
        return autograd.grouped_allgather(tensors, name, process_set)


class HorovodBroadcast:
    """`apply(tensor, root_rank, name, process_set)`."""

    apply = staticmethod(autograd.broadcast)


class HorovodAlltoall:
    """`apply(tensor, splits, name, process_set)`: the rows and the received splits."""

    apply = staticmethod(autograd.alltoall)


class HorovodReducescatter:
    """`apply(tensor, name, op, process_set, prescale_factor, postscale_factor)`."""

    @staticmethod
    def apply(tensor: Any, name: Any, op: Any, process_set: Any, prescale: float, postscale: float) -> Any:
        return autograd.reducescatter(tensor, name, Compression.none, op, process_set, prescale, postscale)


class HorovodGroupedReducescatter:
    """`apply(name, op, process_set, prescale_factor, postscale_factor, *tensors)`."""

    @staticmethod
    def apply(name: Any, op: Any, process_set: Any, prescale: float, postscale: float, *tensors: Any) -> Any:
        return autograd.grouped_reducescatter(tensors, name, Compression.none, op, process_set, prescale, postscale)
