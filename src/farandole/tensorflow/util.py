# Names that other programs import from horovod.tensorflow.util.
# Touches TensorFlow and compat.
"""Functions for eager mode, for graphs, for caches, and for variables as keys of dictionaries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..bindings.compat import _cache as _cache
from .framework import tf


def _executing_eagerly() -> bool:
    """Whether an operation runs at once when it is called, instead of becoming part of a graph."""
    return bool(tf.executing_eagerly())


def _make_subgraph(f: Callable[..., Any]) -> Any:
    """Returns `f` as a function that TensorFlow runs as a graph."""
    return tf.function(f)


@dataclass(frozen=True, eq=False)
class _Reference:
    """A dictionary key for a variable of Keras 3. Such variables have no method `ref()`."""

    variable: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Reference) and other.variable is self.variable

    def __hash__(self) -> int:
        return id(self.variable)

    def deref(self) -> Any:
        """Returns the variable, as `deref()` of TensorFlow's references does."""
        return self.variable


def vars_to_refs(vars: Any) -> Any:
    """Returns a dictionary key for a variable. For a list or tuple of variables, returns a tuple of keys."""
    if isinstance(vars, (list, tuple)):
        return tuple(vars_to_refs(variable) for variable in vars)
    return vars.ref() if hasattr(vars, "ref") else _Reference(vars)


def refs_to_vars(refs: Any) -> Any:
    """Returns the variables of keys that `vars_to_refs` returned. For a tuple of keys, returns a list."""
    if isinstance(refs, (list, tuple)):
        return [refs_to_vars(ref) for ref in refs]
    return refs.deref()
