# Trees of dictionaries, lists and tuples with tensors in them: taken apart, and put together again.
# Touches torch.
"""`split` gives the tensors and the rest; `join` puts tensors where they stood."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class _Place:
    """Where a tensor stood."""

    number: int


def split(tree: Any) -> tuple[Any, list[torch.Tensor]]:
    """The tree with a copy of all that is no tensor, and its tensors; one that it has twice comes once."""
    tensors: list[torch.Tensor] = []
    return _split(tree, tensors, {}), tensors


def _split(value: Any, tensors: list[torch.Tensor], seen: dict[int, int]) -> Any:
    if isinstance(value, torch.Tensor):
        if id(value) not in seen:
            seen[id(value)] = len(tensors)
            tensors.append(value)
        return _Place(seen[id(value)])
    if isinstance(value, dict):
        return {key: _split(item, tensors, seen) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_split(item, tensors, seen) for item in value)
    return copy.deepcopy(value)


def join(rest: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The tree that `split` took apart, with these tensors in it."""
    if isinstance(rest, _Place):
        return tensors[rest.number]
    if isinstance(rest, dict):
        return {key: join(item, tensors) for key, item in rest.items()}
    if type(rest) in (list, tuple):
        return type(rest)(join(item, tensors) for item in rest)
    return copy.deepcopy(rest)
