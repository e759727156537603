# How work gets done on the host: at once on concrete arrays, and in callbacks of compiled functions.
# Touches JAX, NumPy, work and the NumPy layer.
"""NumPy sees a JAX array's own memory on the CPU, and JAX takes over NumPy's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..engine import Array, Kind
from ..work import Work, begin, results
from .failures import settle
from .framework import jax


def carry_out(work: Work, arrays: Sequence[Any], splits: Any = None) -> list[Any]:
    """The outputs of the work on concrete arrays; of an alltoall with splits the received splits as well.

    What compiled functions have begun is done first: everything happens in the order of the program.
    """
    settle()
    found = results(work, begin(work, _views(arrays), splits))
    if work.kind == Kind.ALLTOALL and splits is None:
        found = found[:1]
    return [jax.numpy.asarray(array) for array in found]


def arrays_of(work: Work, arrays: Sequence[Any]) -> list[Array]:
    """The same inside a compiled function, with NumPy's arrays."""
    found = results(work, begin(work, _views(arrays)))
    return found[:1] if work.kind == Kind.ALLTOALL else found


def _views(arrays: Sequence[Any]) -> list[Array]:
    return [np.ascontiguousarray(np.asarray(array)).reshape(np.shape(array)) for array in arrays]
