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

# Bytes of a new tensor. Allocators give larger blocks back to the system, and new pages cost more than the whole call;
# the engine keeps the memory of its own results.
LARGEST_NEW = 16 << 20
MOST = 1024  # calls that a world knows; scripts that never use a name twice must not fill the memory


class _Known:
    """A call that has succeeded before."""

    __slots__ = ("dtype", "in_place", "prepared", "result", "shape")

    def __init__(self, tensor: torch.Tensor, result: torch.Tensor, begun: Beginning) -> None:
        [request] = begun.requests
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.in_place = result is tensor
        self.result = result.shape
        # The tensors themselves may go.
        first, output = Span(0, request.input.shape, None, None), Span(0, tuple(result.shape), None, None)
        self.prepared = begun.world.engine.prepare(replace(request, input=first, output=output))


def _spans(tensor: torch.Tensor, result: torch.Tensor) -> tuple[Span, Span]:
    first = span(tensor)
    return first, first if result is tensor else span(result)


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
    # Of the same shape it is made more quickly.
    result = torch.empty_like(tensor) if known.result == known.shape else tensor.new_empty(known.result)
    outcome = world.engine.run_again(known.prepared, place, result.data_ptr(), _spans, tensor, result)
    if outcome is not None and outcome.output.shape != known.result:
        return tensor_of(outcome.output, known.dtype is torch.bfloat16)  # other ranks have sent more, or less
    world.repeats[key] = known
    return result


def first(key: Any, tensor: torch.Tensor, begun: Beginning) -> Any:
    """The result of a call on one tensor that is not known; from now on it is, if that brings anything."""
    result = begun.result()
    if tensor.is_cpu and (result is tensor or result.nbytes <= LARGEST_NEW):
        repeats = begun.world.repeats
        if len(repeats) >= MOST:
            repeats.clear()
        repeats[key] = _Known(tensor, result, begun)
    return result
