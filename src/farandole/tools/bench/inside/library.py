"""The interface of a measured library: it makes its kind of tensor, and runs a collective on it.
Touches NumPy alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

OPERATIONS = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")
Call = Callable[[Any], Any]


class Library:
    """A library that is measured. The defaults are for a library that works on NumPy arrays."""

    rank = 0
    size = 1

    def open(self) -> None:
        """Joins the other ranks."""

    def close(self) -> None:
        """Leaves the other ranks."""

    def tensor_of(self, array: Any, dtype: str) -> Any:
        """A tensor with these values."""
        return array.astype(dtype)

    def array_of(self, tensor: Any) -> Any:
        """The tensor's values as an array."""
        return tensor

    def copy(self, tensor: Any) -> Any:
        """A tensor in new memory."""
        return tensor.copy()

    def refill(self, tensor: Any, source: Any) -> None:
        """Copies the values of `source` into the tensor."""
        np.copyto(tensor, source)

    def call(self, operation: str, name: str, fresh: bool) -> Call:
        """The collective under this name; `fresh`: results never go into memory that was used before."""
        raise NotImplementedError
