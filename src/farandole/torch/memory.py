# Tensors as memory of the engine, in place. Where the engine cannot use CUDA tensors, pinned host copies stand in.
# Touches torch, arrays, engine, pending and runtime. The only file of the binding that knows about streams.
"""`begin(tensors, ...)` turns tensors into buffers, and results into tensors on the same device."""

from __future__ import annotations

import itertools
import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch

from ..engine import cuda
from ..engine.interface import Array, DType, Kind, Memory, Outcome, Span
from ..operations.arrays import Buffer
from ..operations.pending import Submission, output_of
from ..world.runtime import runtime
from ..world.world import Pending, World

_log = logging.getLogger("farandole")

_TYPES: dict[Any, DType] = {
    kind: dtype for dtype in DType if (kind := getattr(torch, dtype.name.lower(), None)) is not None
}

Build = Callable[[Sequence[Buffer], bool], Submission]


def supported(dtype: torch.dtype) -> bool:
    """Whether the engine knows this element type."""
    return dtype in _TYPES


def tensor_of(array: Array, bfloat16: bool = False) -> torch.Tensor:
    """A CPU tensor over the array's memory."""
    if bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def span(tensor: torch.Tensor) -> Span:
    """Describes a CPU tensor's memory and keeps it alive."""
    # It also keeps the storage: `tensor.data = other` releases it while the engine still uses it.
    return Span(tensor.data_ptr(), tuple(tensor.shape), tensor, tensor.untyped_storage())


class TensorBuffer(Buffer):
    """A CPU tensor's memory. The engine gets only its address: a NumPy view would cost more than a small operation."""

    __slots__ = ()

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = type_of(tensor)
        self.array = span(tensor)

    def give(self, result: Memory) -> torch.Tensor:
        if type(result) is Span:
            return cast(torch.Tensor, result.owner)
        return tensor_of(result, self.dtype == DType.BFLOAT16)

    def empty_like(self, rows: int | None = None) -> Span:
        shape = self.array.shape if rows is None else (rows, *self.array.shape[1:])
        return span(self.array.owner.new_empty(shape))  # on its device, whatever torch's default device is

    def head(self, rows: int) -> Span:
        whole = self.array
        return Span(whole.address, (rows, *whole.shape[1:]), whole.owner, whole.memory)


class DeviceBuffer(TensorBuffer):
    """A CUDA tensor's memory, which the engine uses on the device."""

    __slots__ = ()

    # The engine has no memory on devices, so the binding offers some for every result whose size it can guess.
    offered = sys.maxsize

    def give(self, result: Memory) -> torch.Tensor:
        tensor = super().give(result)
        return tensor if type(result) is Span else tensor.to(self.array.owner.device)


def type_of(tensor: torch.Tensor) -> DType:
    """The element type. ValueError for types and layouts that cannot be sent."""
    dtype = _TYPES.get(tensor.dtype)
    if dtype is None:
        supported = ", ".join(str(kind).removeprefix("torch.") for kind in _TYPES)
        raise ValueError(f"tensors of dtype {tensor.dtype} are not supported; supported are {supported}")
    if tensor.layout != torch.strided:
        raise ValueError(f"tensors of layout {tensor.layout} are not supported; see sparse_allreduce_async")
    if not tensor.is_contiguous():
        raise ValueError(f"the tensor of shape {tuple(tensor.shape)} is not contiguous; pass tensor.contiguous()")
    if tensor.is_neg():
        raise ValueError("the tensor's elements are negated only when they are read; pass tensor.resolve_neg()")
    return dtype


def begin(tensors: Sequence[torch.Tensor], in_place: bool, grouped: bool, build: Build) -> Submission:
    """Calls `build` with the tensors' buffers; the result gives tensors (in place: the same ones).

    `build(buffers, in_place)` is called at once. Host copies of CUDA tensors are filled a little later.
    """
    near = True
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"expected a torch.Tensor, not {type(tensor).__name__}")
        near = near and tensor.is_cpu
    if not near and not engine_reaches_gpus(runtime.world):
        return _staged(tensors, in_place, grouped, build)
    begun = build([(TensorBuffer if near else DeviceBuffer)(tensor) for tensor in tensors], in_place)
    if not near:
        _place(begun, tensors)
    if in_place:
        results = tuple(tensors) if grouped else tensors[0]
        begun.finish = lambda outcomes: results
    return begun


# --- CUDA ------------------------------------------------------------------------------------------------------------

_reached: WeakKeyDictionary[World, bool] = WeakKeyDictionary()


def engine_reaches_gpus(world: World) -> bool:
    """Whether the engine of this world can use CUDA tensors. Asked once; the log says why not."""
    reached = _reached.get(world)
    if reached is None:
        why = "torch is built for ROCm" if torch.version.cuda is None else cuda.enable(world.engine, world.config)
        if why:
            _log.info("CUDA tensors are copied to the host by torch: %s", why)
        reached = _reached[world] = not why
    return reached


def _one_device(tensors: Sequence[torch.Tensor]) -> torch.device:
    [device, *others] = {tensor.device for tensor in tensors}
    if others or device.type != "cuda":
        raise ValueError(f"tensors must be on the CPU or on one CUDA device, not on {[device, *others]}")
    return device


def gpu_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The device of a CUDA tensor and the current stream there, for a request."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("an operation between ranks cannot be part of a CUDA graph; call it outside of the capture")
    return tensor.device.index, torch.cuda.current_stream(tensor.device).cuda_stream


def _place(begun: Submission, tensors: Sequence[torch.Tensor]) -> None:
    """Tells the engine on which device and in which stream the tensors are."""
    device = _one_device(tensors)
    gpu = gpu_of(tensors[0])
    for request in begun.requests:
        request.device = device.index
        request.gpu = gpu


@dataclass
class _Staging:
    """What a world needs for CUDA tensors: one copy stream for each device, and a thread that waits for the copies."""

    # The thread ends with the world: an executor without references ends its threads.
    worker: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(max_workers=1, thread_name_prefix="farandole-staging")
    )
    streams: dict[torch.device, Any] = field(default_factory=dict)
    # Another thread submits these operations. Without names they could overtake those on CPU tensors, so they get
    # names.
    unnamed: defaultdict[tuple[int, Kind], Iterator[int]] = field(
        default_factory=lambda: defaultdict(lambda: itertools.count(1))
    )

    def stream(self, device: torch.device) -> Any:
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)
        return self.streams[device]


_stagings: WeakKeyDictionary[World, _Staging] = WeakKeyDictionary()


def flush(world: World) -> None:
    """Returns when every operation begun so far has reached the engine; barrier and join must come after them."""
    staging = _stagings.get(world)
    if staging is not None:
        staging.worker.submit(lambda: None).result()


class _StagedPending(Pending):
    """The pending state of requests that the worker submits as soon as the copy to the host is done."""

    def __init__(self, future: Future[list[int]], finish: Callable[[list[Outcome]], Any]) -> None:
        self._future = future
        super().__init__([], finish)

    def submitted(self) -> bool:
        return self._future.done()

    @property
    def handles(self) -> list[int]:
        return [] if self._future.exception() else self._future.result()

    @handles.setter
    def handles(self, value: list[int]) -> None:
        """Does nothing: the future has the handles."""


class _Staged(Submission):
    """Operations on pinned copies of CUDA tensors."""

    __slots__ = ("copied", "staging")

    def __init__(self, begun: Submission, finish: Callable[[list[Outcome]], Any], staging: _Staging, copied: Any):
        super().__init__(begun.world, begun.requests, finish, begun.bundle)
        self.staging = staging
        self.copied = copied

    def result(self) -> Any:
        self.copied.synchronize()
        return super().result()

    def handle(self) -> int:
        future = self.staging.worker.submit(self._submit)

        def finish(outcomes: list[Outcome]) -> Any:
            future.result()  # raises what the submission raised
            return self.finish(outcomes)

        return self.world.add_handle(_StagedPending(future, finish))

    def _submit(self) -> list[int]:
        self.copied.synchronize()
        return self.world.engine.submit(self.requests, self.bundle)


def _staged(tensors: Sequence[torch.Tensor], in_place: bool, grouped: bool, build: Build) -> Submission:
    device = _one_device(tensors)
    for tensor in tensors:
        type_of(tensor)
    with torch.cuda.device(device):
        hosts = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    buffers = [TensorBuffer(host) for host in hosts]
    begun = build(buffers, True)
    staging = _stagings.setdefault(begun.world, _Staging())
    for request in begun.requests:
        request.device = 0  # each rank may use another device
        request.gpu = None
        if request.name is None:
            number = next(staging.unnamed[request.group, request.kind])
            request.name = f"{request.kind.name.lower()}.noname.device.{number}"
    stream = staging.stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for host, tensor in zip(hosts, tensors, strict=True):
            host.copy_(tensor.detach(), non_blocking=True)
        copied = stream.record_event(torch.cuda.Event(blocking=True))  # blocking: waiting uses no core

    def finish(outcomes: list[Outcome]) -> Any:
        # On the caller's current stream, so that all later work of the caller comes after the copy.
        results = []
        for buffer, outcome, tensor in zip(buffers, outcomes, tensors, strict=True):
            source = buffer.give(output_of(outcome))
            target = tensor.detach() if in_place else torch.empty(source.shape, dtype=tensor.dtype, device=device)
            target.copy_(source, non_blocking=True)
            results.append(tensor if in_place else target)
        return tuple(results) if grouped else results[0]

    return _Staged(begun, finish, staging, copied)
