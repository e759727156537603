"""What a library that is measured has to do: make its kind of tensor, and a collective on it.
Touches NumPy alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

OPERATIONS = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")
Call = Callable[[Any], Any]


class Library:
    """What all of them have. `take` makes their kind of tensor of an array, `give` an array of theirs."""

    rank = 0
    size = 1

    def open(self) -> None:
        """Joins the others."""

    def close(self) -> None:
        """Leaves."""

    def take(self, array: Any, dtype: str) -> Any:
        """A tensor with these values."""
        return array.astype(dtype)

    def give(self, tensor: Any) -> Any:
        """Its values."""
        return tensor

    def copy(self, tensor: Any) -> Any:
        """A tensor in new memory."""
        return tensor.copy()

    def refill(self, tensor: Any, source: Any) -> None:
        """The source's values again."""
        np.copyto(tensor, source)

    def call(self, operation: str, name: str, fresh: bool) -> Call:
        """The collective under this name; `fresh`: results never go into memory that was used before."""
        raise NotImplementedError
