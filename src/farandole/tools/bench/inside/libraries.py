"""The libraries that are measured, with the same methods: a collective on a tensor, by its name.
Imports torch, mpi4py and the library itself only when asked for it; Gloo meets in a file or at an address."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from .library import Call, Library
from .stream import Streams


class Tensors(Library):
    """Torch tensors instead of arrays."""

    def __init__(self) -> None:
        import torch

        self.torch: Any = torch
        self.torch.set_num_threads(1)

    def tensor_of(self, array: Any, dtype: str) -> Any:
        return self.torch.from_numpy(array.copy()).to(getattr(self.torch, dtype))

    def array_of(self, tensor: Any) -> Any:
        return tensor.to(self.torch.float32).numpy()

    def copy(self, tensor: Any) -> Any:
        return tensor.clone()

    def refill(self, tensor: Any, source: Any) -> None:
        tensor.copy_(source)


def horovod_call(hvd: Any, operation: str, name: str) -> Call:
    """Horovod's names, for torch and for NumPy: in place where there is such a call."""
    if operation == "allreduce":
        return lambda tensor: hvd.allreduce_(tensor, op=hvd.Sum, name=name)
    if operation == "broadcast":
        return lambda tensor: hvd.broadcast_(tensor, 0, name=name)
    if operation == "allgather":
        return lambda tensor: hvd.allgather(tensor, name=name)
    if operation == "reducescatter":
        reducescatter = hvd.reducescatter
        return lambda tensor: reducescatter(tensor, op=hvd.Sum, name=name)
    alltoall = hvd.alltoall

    def exchange(tensor: Any) -> Any:
        result = alltoall(tensor, name=name)
        return result[0] if isinstance(result, tuple) else result

    return exchange


class WithHorovodsNames(Library):
    """Whatever has Horovod's interface: the module `hvd`."""

    hvd: Any
    prefix: str  # of the names of operations

    def open(self) -> None:
        if not self.hvd.is_initialized():
            self.hvd.init()
        self.rank, self.size = self.hvd.rank(), self.hvd.size()

    def close(self) -> None:
        self.hvd.shutdown()

    def call(self, operation: str, name: str, fresh: bool) -> Call:
        return horovod_call(self.hvd, operation, f"{self.prefix}.{name}")


class Horovod(WithHorovodsNames, Tensors):
    """Horovod's interface for torch: ours (farandole.torch) or another's (horovod.torch)."""

    prefix = "torch"

    def __init__(self, module: str) -> None:
        super().__init__()
        self.hvd = importlib.import_module(module)


class Arrays(WithHorovodsNames):
    """Ours with NumPy arrays."""

    prefix = "numpy"

    def __init__(self) -> None:
        import farandole

        self.hvd = farandole


class Gloo(Tensors):
    """torch.distributed over Gloo."""

    def __init__(self, rank: int, size: int, meet: str) -> None:
        super().__init__()
        from torch import distributed

        self.distributed: Any = distributed
        self.rank, self.size = rank, size
        self._meet = meet
        self._times = 0

    def open(self) -> None:
        self._times += 1  # a file serves one meeting
        meet = f"{self._meet}.{self._times}" if self._meet.startswith("file:") else self._meet
        self.distributed.init_process_group("gloo", init_method=meet, rank=self.rank, world_size=self.size)

    def close(self) -> None:
        self.distributed.destroy_process_group()

    def call(self, operation: str, name: str, fresh: bool) -> Call:
        d, size, kept = self.distributed, self.size, {}

        def room(tensor: Any, elements: int) -> Any:
            if fresh:
                return tensor.new_empty(elements)
            if "room" not in kept:
                kept["room"] = tensor.new_empty(elements)
            return kept["room"]

        def into(collective: Any, elements: Callable[[int], int]) -> Call:
            def run(tensor: Any) -> Any:
                result = room(tensor, elements(tensor.numel()))
                collective(result, tensor)
                return result

            return run

        def in_place(collective: Any, *more: Any) -> Call:
            def run(tensor: Any) -> Any:
                collective(tensor, *more)
                return tensor

            return run

        table: dict[str, Callable[[], Call]] = {
            "allreduce": lambda: in_place(d.all_reduce),
            "broadcast": lambda: in_place(d.broadcast, 0),
            "allgather": lambda: into(d.all_gather_into_tensor, lambda count: count * size),
            "alltoall": lambda: into(d.all_to_all_single, lambda count: count),
            "reducescatter": lambda: into(d.reduce_scatter_tensor, lambda count: count // size),
        }
        return table[operation]()


class Mpi(Library):
    """MPI through mpi4py, with NumPy arrays."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self.mpi = MPI
        self.world = self.mpi.COMM_WORLD
        self.rank, self.size = self.world.rank, self.world.size

    def call(self, operation: str, name: str, fresh: bool) -> Call:
        world, kept = self.world, {}

        def room(tensor: Any, elements: int) -> Any:
            if fresh:
                return np.empty(elements, tensor.dtype)
            if "room" not in kept:
                kept["room"] = np.empty(elements, tensor.dtype)
            return kept["room"]

        def run(tensor: Any) -> Any:
            if operation == "allreduce":
                world.Allreduce(self.mpi.IN_PLACE, tensor, op=self.mpi.SUM)
                return tensor
            if operation == "broadcast":
                world.Bcast(tensor, 0)
                return tensor
            if operation == "allgather":
                result = room(tensor, tensor.size * self.size)
                world.Allgather(tensor, result)
            elif operation == "alltoall":
                result = room(tensor, tensor.size)
                world.Alltoall(tensor, result)
            else:
                result = room(tensor, tensor.size // self.size)
                world.Reduce_scatter_block(tensor, result, op=self.mpi.SUM)
            return result

        return run


class NoLibrary(Tensors):
    """No library at all: processes that train by themselves."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size


class Limits(Library):
    """What the machine can do: memcpy, and a sum in place."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def make(kind: str, rank: int, size: int, meet: str, module: str) -> Library:
    """The library of a pool."""
    if kind == "horovod":
        return Arrays() if module == "farandole" else Horovod(module)
    if kind == "gloo":
        return Gloo(rank, size, meet)
    if kind == "mpi":
        return Mpi()
    if kind == "streams":
        return Streams(rank, meet.split(","))
    return NoLibrary(rank, size) if kind == "alone" else Limits(rank, size)
