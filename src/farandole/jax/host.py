# How work gets done on the host: at once on concrete arrays, and in callbacks of compiled functions.
# Touches JAX, NumPy, work and the NumPy layer.
"""NumPy sees a JAX array's own memory on the CPU, and JAX takes over NumPy's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays import Buffer, incoming
from ..engine import Array, Kind, Memory
from ..work import Work, begin, results
from .failures import settle
from .framework import jax

ALIGNMENT = 64  # bytes; JAX copies what begins elsewhere


class Aligned(Buffer):
    """An array's memory; results lie so that JAX takes their memory over as it is."""

    __slots__ = ()

    def empty_like(self, rows: int | None = None) -> Memory:
        """New memory of the same shape, or with another first dimension."""
        shape = self.array.shape if rows is None else (rows, *self.array.shape[1:])
        count = math.prod(shape) * self.array.itemsize
        whole = np.empty(count + ALIGNMENT, np.uint8)
        start = -whole.ctypes.data % ALIGNMENT
        return whole[start : start + count].view(self.array.dtype).reshape(shape)


def carry_out(work: Work, arrays: Sequence[Any], splits: Any = None) -> list[Any]:
    """The outputs of the work on concrete arrays; of an alltoall with splits the received splits as well.

    What compiled functions have begun is done first: everything happens in the order of the program.
    """
    settle()
    buffers = [Aligned(seen.array, seen.dtype, seen.give) for seen in map(incoming, _views(arrays))]
    found = results(work, begin("jax", work, buffers, splits))
    if work.kind == Kind.ALLTOALL and splits is None:
        found = found[:1]
    return list(jax.device_put(found))  # unlike jax.numpy.asarray it takes their memory over


def arrays_of(work: Work, arrays: Sequence[Any]) -> list[Array]:
    """The same inside a compiled function, with NumPy's arrays."""
    found = results(work, begin("jax", work, _views(arrays)))
    return found[:1] if work.kind == Kind.ALLTOALL else found


def _views(arrays: Sequence[Any]) -> list[Array]:
    return [np.ascontiguousarray(np.asarray(array)).reshape(np.shape(array)) for array in arrays]
