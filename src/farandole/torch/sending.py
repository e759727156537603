# Submits the dense tensors of slots to the engine: CPU tensors directly, device tensors through staging memory.
# Touches torch, slots, memory and the NumPy layer below.
"""`begin(slots)` submits each slot's `tensor`, in place; each batch knows how to wait for its operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from ..engine.interface import Engine
from ..operations.arrays import Buffer
from ..operations.pending import Submission, synchronize
from ..world.runtime import runtime
from . import memory
from .slots import PackedBucket, Slot

A_MOMENT = 0.01  # seconds; ranks of a host mostly differ by less time, and scripts do not notice this delay


class Batch:
    """Slots that were submitted in one call, and how to wait for them."""

    __slots__ = ("slots", "wait")

    def __init__(self, slots: Sequence[Slot], wait: Callable[[], None]) -> None:
        self.slots = slots
        self.wait = wait


def _wait_for(engine: Engine, handles: list[int]) -> Callable[[], None]:
    def wait() -> None:
        failure: Exception | None = None
        while handles:
            try:
                engine.wait(handles[-1])
            except Exception as error:
                failure = failure or error
            handles.pop()
        if failure is not None:
            raise failure

    handles.reverse()  # so that the first handle is popped first
    return wait


def begin(slots: Sequence[Slot], together: bool) -> Iterable[Batch]:
    """Submits dense tensors: CPU tensors directly, device tensors through staging memory."""
    on_cpu: list[Slot] = []
    by_device: dict[torch.device, list[Slot]] = {}
    for slot in slots:
        tensor = slot.tensor
        assert tensor is not None
        if tensor.is_cpu:
            buffer = memory.TensorBuffer(tensor)
            request = slot.request
            request.input = request.output = buffer.array
            request.dtype = buffer.dtype
            on_cpu.append(slot)
        else:
            by_device.setdefault(tensor.device, []).append(slot)
    if on_cpu:
        engine = runtime.world.engine
        handles = engine.submit([slot.request for slot in on_cpu], together)
        yield Batch(on_cpu, _wait_for(engine, handles))
    for device_slots in by_device.values():
        yield _begin_on_device(device_slots, together)


def begin_scattered(packed: PackedBucket, batches: list[Batch], ending: bool) -> None:
    """Submits a packed bucket, whose gradients the engine uses in place, as one more batch.

    `ending`: backward ends with this call. If there is no other batch, the bucket is often done a moment later, before
    the script continues, and its memory need not be held.
    """
    engine = runtime.world.engine
    slot = packed.slot
    slot.request.dtype = memory.type_of(slot.param)
    alone = ending and not batches
    done = False
    [handle] = handles = engine.submit([slot.request], prompt=alone)
    try:
        batches.append(Batch([slot], _wait_for(engine, handles)))
        done = alone and engine.poll(handle, A_MOMENT)
    finally:
        if not done:
            packed.hold()


def _begin_on_device(slots: Sequence[Slot], together: bool) -> Batch:
    def build(buffers: Sequence[Buffer], _: bool) -> Submission:
        for slot, buffer in zip(slots, buffers, strict=True):
            slot.request.input = slot.request.output = buffer.array
            slot.request.dtype = buffer.dtype
        return Submission(runtime.world, [slot.request for slot in slots], lambda outcomes: None, together)

    handle = memory.begin([slot.tensor for slot in slots if slot.tensor is not None], True, True, build).handle()
    return Batch(slots, lambda: synchronize(handle))
