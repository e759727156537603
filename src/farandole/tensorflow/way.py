# Which way work takes in graphs: the compiled operations, or callbacks of Python.
# Touches TensorFlow and host.
"""`carry_out(work, tensors, splits)` gives the outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import host
from .work import Work


def carry_out(work: Work, tensors: Sequence[Any], splits: Any = None) -> list[Any]:
    """The outputs of the work on these tensors."""
    return host.carry_out(work, tensors, splits)
