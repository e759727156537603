# Operations that a script repeats on NumPy arrays: what the first call checked and packed is kept.
# Touches NumPy; the rooms engine and world; the file pending.
"""For small arrays, preparing a call costs more than the operation. A known call only checks the array and runs.
torch/repeats.py does the same for tensors, in the same table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..engine.interface import Array, Span
from ..world.runtime import runtime
from ..world.world import World
from .pending import Submission

MOST = 1024  # known calls in a world; scripts that never repeat a name must not fill the memory


def known(key: Any) -> Any:
    """What is kept of the first call with these arguments, or None."""
    try:
        return runtime.world.repeats.get(key)
    except TypeError:
        return None  # an argument of a wrong type


def remember(world: World, key: Any, kept: Any) -> None:
    """Keeps what the next calls with these arguments need."""
    if len(world.repeats) >= MOST:
        world.repeats.clear()
    world.repeats[key] = kept


def again(key: Any, array: Any) -> Any:
    """Runs the call if it is known and the array is of the same kind as before. Gives its result, or None."""
    run = known(key)
    if run is None or type(array) is not np.ndarray:
        return None
    result = array if key[0] else np.empty_like(array)
    return None if run(array, result) is NotImplemented else result


def first(key: Any, array: Any, begun: Submission) -> Any:
    """The result of a call that is not known yet; it is known from now on. `key` begins with whether it is in place."""
    result = begun.result()
    if type(array) is np.ndarray:
        [request] = begun.requests
        # The known call keeps no reference to the arrays.
        seen = Span(0, array.shape, None, None)
        output = seen if key[0] else Span(0, array.shape, None, None)
        prepared = begun.world.engine.prepare(replace(request, input=seen, output=output), np.ndarray, _arrays)
        if prepared is not None:
            remember(begun.world, key, prepared.run)
    return result


def _arrays(array: Array, result: Array) -> tuple[Array, Array]:
    return array, result
