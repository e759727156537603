# Operations that a script calls again and again: what was checked and packed the first time is kept.
# Touches torch, memory, engine, pending and runtime.
"""For small tensors the way to the engine costs more than the work: a known call only checks the tensor and runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..engine import Span
from ..pending import Beginning
from ..runtime import runtime
from .memory import span, tensor_of

# Results from so many bytes on are in the engine's memory, which it keeps: allocators give larger blocks back to the
# system, and new pages cost more than the whole call. Those of an alltoall lie there where neighbours can write them.
KEPT = (16 << 20) + 1
SHARED = 4 << 20  # kShareResults in core/collective/select.h
MOST = 1024  # calls that a world knows; scripts that never use a name twice must not fill the memory


class _Known:
    """A call that has succeeded before."""

    __slots__ = ("dtype", "in_place", "prepared", "result", "shape")

    def __init__(self, tensor: torch.Tensor, result: torch.Tensor, begun: Beginning, kept: int) -> None:
        [request] = begun.requests
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.in_place = result is tensor
        self.result = result.shape if self.in_place or result.nbytes < kept else None  # None: in the engine's memory
        # The tensors themselves may go.
        first = Span(0, request.input.shape, None, None)
        output = None if self.result is None else Span(0, tuple(self.result), None, None)
        self.prepared = begun.world.engine.prepare(replace(request, input=first, output=output))


def _spans(tensor: torch.Tensor, result: torch.Tensor | None) -> tuple[Span, Span | None]:
    first = span(tensor)
    return first, first if result is tensor else None if result is None else span(result)


def again(key: Any, tensor: torch.Tensor) -> torch.Tensor | None:
    """Runs the call, if it is known and the tensor is of the same kind as before, and gives its result."""
    world = runtime.world
    try:
        known = world.repeats.pop(key, None)  # nobody else may run it meanwhile
    except TypeError:
        return None  # an argument of a wrong kind
    if known is None or type(tensor) is not torch.Tensor or tensor.dtype is not known.dtype:
        return None
    if tensor.shape != known.shape or not tensor.is_cpu or tensor.layout is not torch.strided:
        return None
    if not tensor.is_contiguous() or tensor.is_neg():
        return None
    place = tensor.data_ptr()
    if known.in_place:
        world.engine.run_again(known.prepared, place, place, _spans, tensor, tensor)
        world.repeats[key] = known
        return tensor
    if known.result is None:
        result = None
    else:
        # Of the same shape it is made more quickly.
        result = torch.empty_like(tensor) if known.result == known.shape else tensor.new_empty(known.result)
    output_at = 0 if result is None else result.data_ptr()
    outcome = world.engine.run_again(known.prepared, place, output_at, _spans, tensor, result)
    if outcome is None or (result is not None and outcome.output.shape == known.result):
        world.repeats[key] = known
        return result
    if result is None:
        world.repeats[key] = known  # else other ranks have sent more than before, or less, and may again
    return tensor_of(outcome.output, known.dtype is torch.bfloat16)


def first(key: Any, tensor: torch.Tensor, begun: Beginning, kept: int = KEPT) -> Any:
    """The result of a call on one tensor that is not known; from now on it is."""
    result = begun.result()
    if tensor.is_cpu:
        repeats = begun.world.repeats
        if len(repeats) >= MOST:
            repeats.clear()
        repeats[key] = _Known(tensor, result, begun, kept)
    return result
