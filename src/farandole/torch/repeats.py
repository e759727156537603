# Operations in place that a script calls again and again: what was checked and packed the first time is kept.
# Touches torch, memory, engine, pending and runtime.
"""For small tensors the way to the engine costs more than the work: a known call only checks the tensor and runs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..engine import Span
from ..pending import Beginning
from ..runtime import runtime
from .memory import span

MOST = 1024  # calls that a world knows; scripts that never use a name twice must not fill the memory


class _Known:
    """A call that has succeeded before."""

    __slots__ = ("dtype", "prepared", "shape")

    def __init__(self, tensor: torch.Tensor, prepared: Any) -> None:
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.prepared = prepared


def again(key: Any, tensor: torch.Tensor) -> bool:
    """Runs the call if it is known and the tensor is of the same kind as before."""
    world = runtime.world
    try:
        known = world.repeats.pop(key, None)  # nobody else may run it meanwhile
    except TypeError:
        return False  # an argument of a wrong kind
    if known is None or type(tensor) is not torch.Tensor or tensor.dtype is not known.dtype:
        return False
    if tensor.shape != known.shape or not tensor.is_cpu or tensor.layout is not torch.strided:
        return False
    if not tensor.is_contiguous() or tensor.is_neg():
        return False
    world.engine.run_again(known.prepared, tensor.data_ptr(), partial(span, tensor))
    world.repeats[key] = known
    return True


def remember(key: Any, tensor: torch.Tensor, begun: Beginning) -> None:
    """A call that has succeeded, in place and on one CPU tensor, will be known."""
    if not tensor.is_cpu:
        return
    repeats = begun.world.repeats
    if len(repeats) >= MOST:
        repeats.clear()
    [request] = begun.requests
    nowhere = Span(0, request.input.shape, None, None)  # the tensor itself may go
    repeats[key] = _Known(tensor, begun.world.engine.prepare(replace(request, input=nowhere, output=nowhere)))
