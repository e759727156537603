# MXNet's arrays as memory of the engine; their addresses are known when MXNet says that they are ready.
# Touches MXNet, arrays and engine.
"""The NumPy layer builds requests from `ArrayBuffer(array)`; `new_like` makes arrays of the caller's kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..bindings.private.mxnet_names import fill
from ..engine.interface import Array, DType, Memory, Span, dtype_of
from ..operations.arrays import Buffer
from .framework import mx

# How MXNet represents a type that NumPy does not have.
_BFLOAT16 = np.dtype([("bfloat16", np.uint16)])


def type_of(array: Any) -> DType:
    """The element type. Raises TypeError if it is no array of MXNet, ValueError if it cannot be sent."""
    if not isinstance(array, mx.nd.NDArray):
        raise TypeError(f"expected an mxnet NDArray, not {type(array).__name__}")
    if array.stype != "default":
        raise ValueError(f"arrays of storage type {array.stype} are not supported; array.tostype('default') is dense")
    dtype = np.dtype(array.dtype)
    return DType.BFLOAT16 if dtype == _BFLOAT16 else dtype_of(np.empty(0, dtype))


def new_like(array: Any, shape: Sequence[int]) -> Any:
    """A new array in CPU memory, of the same kind and type."""
    if isinstance(array, mx.np.ndarray):
        return mx.np.empty(tuple(shape), dtype=array.dtype, ctx=mx.cpu())
    with mx.util.np_shape(True):  # otherwise a length of 0 means an unknown length
        return mx.nd.empty(tuple(shape), ctx=mx.cpu(), dtype=array.dtype)


def on_host(array: Any) -> Any:
    """The array itself, or a copy in CPU memory, which MXNet makes when the array is ready."""
    type_of(array)
    return moved(array, mx.cpu()) if array.ctx.device_type == "gpu" else array


def moved(array: Any, context: Any) -> Any:
    """The array itself, or a copy on another device."""
    if array.ctx == context:
        return array
    return array.as_in_ctx(context) if isinstance(array, mx.np.ndarray) else array.as_in_context(context)


class ArrayBuffer(Buffer):
    """An array's memory. Its address is set when MXNet has finished with the array."""

    __slots__ = ()

    def __init__(self, array: Any) -> None:
        self.dtype = type_of(array)
        self.array = _span(array)

    def give(self, result: Memory) -> Any:
        if type(result) is Span:
            return result.owner
        return self._copied(result)

    def empty_like(self, rows: int | None = None) -> Span:
        shape = self.array.shape if rows is None else (rows, *self.array.shape[1:])
        return _span(new_like(self.array.owner, shape))

    def head(self, rows: int) -> Span:
        return Span(0, (rows, *self.array.shape[1:]), self.array.owner, None)

    def _copied(self, result: Array) -> Any:
        array = new_like(self.array.owner, result.shape)
        if result.size:
            values = result.view(_BFLOAT16) if self.dtype == DType.BFLOAT16 else result
            fill(array, values, lambda values: mx.nd.array(values, dtype=array.dtype))
        return array


def _span(array: Any) -> Span:
    return Span(0, tuple(array.shape), array, None)
