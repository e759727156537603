# Operations that a script calls again and again: what was checked and packed the first time is kept.
# Touches torch, memory, engine, pending and runtime.
"""For small tensors the way to the engine costs more than the work: a known call only checks the tensor and runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..engine import Span
from ..pending import Beginning
from ..runtime import runtime
from .memory import span, tensor_of

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

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is of the same kind as before."""
        return (
            type(tensor) is torch.Tensor
            and tensor.dtype is self.dtype
            and tensor.shape == self.shape
            and tensor.is_cpu
            and tensor.layout is torch.strided
            and tensor.is_contiguous()
            and not tensor.is_neg()
        )


def _spans(tensor: torch.Tensor, result: torch.Tensor) -> tuple[Span, Span]:
    first = span(tensor)
    return first, first if result is tensor else span(result)


def call(key: Any, tensor: torch.Tensor, begin: Callable[[], Beginning]) -> Any:
    """The result of the call on one tensor. If it is not known, `begin` begins it, and then it is."""
    world = runtime.world
    try:
        known = world.repeats.pop(key, None)  # nobody else may run it meanwhile
    except TypeError:
        known = None  # an argument of a wrong kind
    if known is None or not known.fits(tensor):
        begun = begin()
        result = begun.result()
        if tensor.is_cpu:
            if len(world.repeats) >= MOST:
                world.repeats.clear()
            world.repeats[key] = _Known(tensor, result, begun)
        return result
    if known.in_place:
        result = tensor
    else:  # the first is the quicker one
        result = torch.empty_like(tensor) if known.result == known.shape else tensor.new_empty(known.result)
    hold = partial(_spans, tensor, result)
    outcome = world.engine.run_again(known.prepared, tensor.data_ptr(), result.data_ptr(), hold)
    if outcome is not None and not known.in_place and outcome.output.shape != known.result:
        return tensor_of(outcome.output, known.dtype is torch.bfloat16)  # other ranks have sent more, or less
    world.repeats[key] = known
    return result
