# Names that other programs import from horovod.tensorflow.util.
# Touches TensorFlow and compat.
"""Eager mode, functions as graphs, caches, and variables as keys of dictionaries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..bindings.compat import _cache as _cache
from .framework import tf


def _executing_eagerly() -> bool:
    """Whether operations run when they are called."""
    return bool(tf.executing_eagerly())


def _make_subgraph(f: Callable[..., Any]) -> Any:
    """The function as a graph."""
    return tf.function(f)


@dataclass(frozen=True, eq=False)
class _Reference:
    """A key for a variable of Keras 3, which has no `ref()`."""

    variable: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Reference) and other.variable is self.variable

    def __hash__(self) -> int:
        return id(self.variable)

    def deref(self) -> Any:
        """The variable."""
        return self.variable


def vars_to_refs(vars: Any) -> Any:
    """Keys for dictionaries from variables; lists become tuples."""
    if isinstance(vars, (list, tuple)):
        return tuple(vars_to_refs(one) for one in vars)
    return vars.ref() if hasattr(vars, "ref") else _Reference(vars)


def refs_to_vars(refs: Any) -> Any:
    """The variables of keys from `vars_to_refs`."""
    if isinstance(refs, (list, tuple)):
        return [refs_to_vars(one) for one in refs]
    return refs.deref()
