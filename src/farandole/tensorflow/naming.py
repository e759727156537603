# Names of operations in graphs: ranks match operations by name, because nodes run in any order.
# Touches TensorFlow's graphs.
"""The same program gives the same names on all ranks, and all names in a graph are different."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary

from .framework import tf

_taken: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()


def checked(name: Any) -> str | None:
    """TypeError unless it is a name or None."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name={name!r} is a {type(name).__name__}; a name is a string, the same on all ranks")
    return name


def in_graph(label: str, name: str | None, tensor: Any, ignore_name_scope: bool) -> str:
    """The name of a new node: the user's `name`, or one made from the tensor's name."""
    graph = tf.compat.v1.get_default_graph()
    if name is None:
        name = f"{label}_{re.sub('[^a-zA-Z0-9]', '_', getattr(tensor, 'name', 'tensor'))}"
    scope = graph.get_name_scope()
    if scope and not ignore_name_scope:
        name = f"{scope}/{name}"
    return _unique(graph, name)


def _unique(graph: Any, name: str) -> str:
    # Bodies of loops and branches are separate graphs that run together with the nodes of the outer graph.
    while getattr(getattr(graph, "outer_graph", None), "building_function", False):
        graph = graph.outer_graph
    taken = _taken.setdefault(graph, Counter())
    taken[name] += 1
    return name if taken[name] == 1 else f"{name}_{taken[name] - 1}"
