# Operations that a script repeats: what the first call checked and packed is kept.
# Touches torch; the rooms engine and operations; the file memory.
"""For small tensors, preparing a call costs more than the operation. A known call only checks the tensor and runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..engine.interface import Span
from ..operations import repeats
from ..operations.pending import Submission
from ..world.runtime import runtime
from .memory import span, tensor_of, type_of

# Results of at least this many bytes are in the engine's memory, which the engine keeps. Allocators give larger blocks
# back to the system, and new pages cost more than the whole call. An alltoall uses SHARED, so that neighbours can write
# into the result.
KEPT = (16 << 20) + 1
SHARED = 4 << 20  # kShareResults in core/collective/select.h


class _Known:
    """A call that has succeeded before: how to run it again, and the shape of its result."""

    __slots__ = ("bfloat16", "in_place", "result", "run", "same")

    def __init__(self, run: Any, tensor: torch.Tensor, result: torch.Tensor, kept: int) -> None:
        self.run = run
        self.bfloat16 = tensor.dtype is torch.bfloat16
        self.in_place = result is tensor
        self.result = result.shape if result.nbytes < kept else None  # None: the result is in the engine's memory
        self.same = self.result == tensor.shape


def _spans(tensor: torch.Tensor, result: torch.Tensor | None) -> tuple[Span, Span | None]:
    first = span(tensor)
    return first, first if result is tensor else None if result is None else span(result)


def again(key: Any, tensor: torch.Tensor) -> torch.Tensor | None:
    """Runs the call if it is known and the tensor is of the same kind as before. Gives its result, or None."""
    known = repeats.known(key)
    if known is None or tensor.is_neg():
        return None
    if known.in_place:
        return None if known.run(tensor, tensor) is NotImplemented else tensor
    result = None
    if known.result is not None:
        # empty_like is faster if the shape is the same.
        result = torch.empty_like(tensor) if known.same else tensor.new_empty(known.result)
    outcome = known.run(tensor, result)
    if outcome is None:
        return result
    if outcome is NotImplemented:
        return None
    if result is not None:
        if outcome.output.shape == known.result:
            return result
        runtime.world.repeats.pop(key, None)  # other ranks have sent more or less than before, and may do so again
    return tensor_of(outcome.output, known.bfloat16)


def first(key: Any, tensor: torch.Tensor, begun: Submission, kept: int = KEPT) -> Any:
    """The result of a call on one tensor that is not known yet; it is known from now on."""
    result = begun.result()
    if tensor.is_cpu:
        known = _known(tensor, result, begun, kept)
        if known is not None:
            repeats.remember(begun.world, key, known)
    return result


def _known(tensor: torch.Tensor, result: torch.Tensor, begun: Submission, kept: int) -> _Known | None:
    [request] = begun.requests
    # The known call keeps no reference to the tensors.
    first = Span(0, request.input.shape, None, None)
    output = first if result is tensor else Span(0, tuple(result.shape), None, None) if result.nbytes < kept else None
    again = replace(request, input=first, output=output, dtype=type_of(tensor))
    prepared = begun.world.engine.prepare(again, type(tensor), _spans)
    return None if prepared is None else _Known(prepared.run, tensor, result, kept)
