# Arrays of callers: NumPy, DLPack or the array interface become NumPy memory that the engine can use.
# Touches engine and NumPy. Imports no framework.
"""`incoming(tensor)` views the caller's memory without a copy and can return results of the same type."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ..engine.interface import STORAGE, Array, DType, Memory, dtype_of

_DLPACK_CPU = 1


class Buffer:
    """The caller's memory as the engine uses it; a framework's binding may have its own class."""

    __slots__ = ("_give", "array", "dtype")

    # The caller provides memory for results whose size is not known in advance, up to this number of bytes. Larger
    # results stay in the engine's memory, which is faster than new memory.
    offered = 64 << 10

    def __init__(self, array: Memory, dtype: DType, give: Callable[[Array], Any]) -> None:
        self.array = array  # C-contiguous; bfloat16 as uint16
        self.dtype = dtype
        self._give = give

    def give(self, result: Memory) -> Any:
        """A result as an array of the caller's type."""
        return self._give(result)

    def empty_like(self, rows: int | None = None) -> Memory:
        """New memory of the same shape, or with another first dimension."""
        shape = self.array.shape if rows is None else (rows, *self.array.shape[1:])
        return np.empty(shape, dtype=self.array.dtype)

    def head(self, rows: int) -> Memory:
        """The memory of the first rows."""
        return self.array[:rows]


def _same(array: Array) -> Array:
    return array


def incoming(tensor: Any, dtype: DType | None = None, writable: bool = False) -> Buffer:
    """A buffer over the memory of `tensor`.

    `dtype` is for bfloat16 in arrays of uint16. Raises ValueError for memory that is not contiguous, not on the CPU,
    not writable although it must be, or of an unsupported type; TypeError if it is not an array.
    """
    if isinstance(tensor, Buffer):
        return tensor  # made by a framework's binding
    array, give, own_dtype = (tensor, _same, None) if isinstance(tensor, np.ndarray) else _view(tensor)
    if not array.flags.c_contiguous:
        raise ValueError(
            f"the array of shape {array.shape} is not contiguous; pass a contiguous copy (numpy.ascontiguousarray)"
        )
    if writable and not array.flags.writeable:
        raise ValueError(
            "the array is read-only, so it cannot receive a result; use the form that gives a new array, or "
            "pass a writable NumPy view"
        )
    if dtype is not None:
        if array.dtype != STORAGE[dtype]:
            raise ValueError(f"dtype={dtype.name.lower()} needs an array of {STORAGE[dtype]}, not of {array.dtype}")
        return Buffer(array, dtype, give)
    if own_dtype is not None:
        return Buffer(array, own_dtype, give)
    found = dtype_of(array)
    if found == DType.BFLOAT16:
        original = array.dtype
        return Buffer(array.view(np.uint16), found, lambda result: result.view(original))
    return Buffer(array, found, give)


def _view(tensor: Any) -> tuple[Array, Callable[[Array], Any], DType | None]:
    """The memory, how to give results back, and the element type where NumPy cannot know it."""
    if hasattr(tensor, "__dlpack__") and hasattr(tensor, "__dlpack_device__"):
        return _from_dlpack(tensor)
    if hasattr(tensor, "__array_interface__"):
        return np.asarray(tensor), _same, None
    raise TypeError(
        f"expected an array (NumPy, or with __dlpack__ or __array_interface__), not {type(tensor).__name__}; "
        "numpy.asarray makes one"
    )


def _from_dlpack(tensor: Any) -> tuple[Array, Callable[[Array], Any], DType | None]:
    device = int(tensor.__dlpack_device__()[0])
    if device != _DLPACK_CPU:
        raise ValueError(f"the array is on a device of DLPack type {device}; only CPU memory is supported")
    # The array's library is already imported; most have these names in their top module.
    library: Any = sys.modules.get(type(tensor).__module__.partition(".")[0])
    give = getattr(library, "from_dlpack", None) or _same
    if str(getattr(tensor, "dtype", "")).endswith("bfloat16") and hasattr(library, "uint16"):
        # NumPy has no bfloat16: it gets the bits as uint16, and the result is viewed as bfloat16 again.
        bits, kind = tensor.view(library.uint16), tensor.dtype
        return _numpy_view(bits), lambda result: give(result).view(kind), DType.BFLOAT16
    return _numpy_view(tensor), give, None


def _numpy_view(tensor: Any) -> Array:
    try:
        return np.from_dlpack(tensor)
    except (BufferError, RuntimeError, TypeError) as error:
        supported = ", ".join(key.name.lower() for key in DType)
        raise ValueError(
            f"the {type(tensor).__name__} cannot be seen as a NumPy array: {str(error).rstrip('.')} "
            f"(supported element types: {supported})"
        ) from None
