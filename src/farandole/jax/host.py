# Runs collectives on the host: directly for concrete arrays, and in callbacks of compiled functions.
# Touches JAX and NumPy; the rooms bindings, engine and operations; the files failures and framework.
"""On the CPU, NumPy reads a JAX array's memory without a copy, and JAX takes over NumPy's memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..bindings.work import Work, begin, results
from ..engine.interface import Array, Kind, Memory
from ..operations.arrays import Buffer, incoming
from .failures import settle
from .framework import jax

ALIGNMENT = 64  # bytes; JAX copies arrays with other alignment


class Aligned(Buffer):
    """An array's memory; results are aligned, so that JAX takes over their memory without a copy."""

    __slots__ = ()

    def empty_like(self, rows: int | None = None) -> Memory:
        """New memory of the same shape, or with another first dimension."""
        shape = self.array.shape if rows is None else (rows, *self.array.shape[1:])
        count = math.prod(shape) * self.array.itemsize
        whole = np.empty(count + ALIGNMENT, np.uint8)
        start = -whole.ctypes.data % ALIGNMENT
        return whole[start : start + count].view(self.array.dtype).reshape(shape)


def carry_out(work: Work, arrays: Sequence[Any], splits: Any = None) -> list[Any]:
    """The outputs of the work on concrete arrays; for an alltoall with splits also the received splits.

    First waits for what compiled functions have begun, so that everything runs in program order.
    """
    settle()
    buffers = [Aligned(seen.array, seen.dtype, seen.give) for seen in map(incoming, _views(arrays))]
    found = results(work, begin("jax", work, buffers, splits))
    if work.kind == Kind.ALLTOALL and splits is None:
        found = found[:1]
    return list(jax.device_put(found))  # unlike jax.numpy.asarray, it takes over their memory


def arrays_of(work: Work, arrays: Sequence[Any]) -> list[Array]:
    """The same inside a compiled function, with arrays of NumPy."""
    found = results(work, begin("jax", work, _views(arrays)))
    return found[:1] if work.kind == Kind.ALLTOALL else found


def _views(arrays: Sequence[Any]) -> list[Array]:
    return [np.ascontiguousarray(np.asarray(array)).reshape(np.shape(array)) for array in arrays]
