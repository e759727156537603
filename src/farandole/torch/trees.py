# Takes tensors out of trees of dictionaries, lists and tuples, and puts them back.
# Touches torch.
"""`split` gives the tensors and the rest; `join` puts tensors back where they were."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class _Place:
    """Marks where a tensor was."""

    number: int


def split(tree: Any) -> tuple[Any, list[torch.Tensor]]:
    """A copy of the tree without its tensors, and the list of tensors; a tensor that occurs twice is listed once."""
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
    """The tree that `split` divided, with these tensors."""
    if isinstance(rest, _Place):
        return tensors[rest.number]
    if isinstance(rest, dict):
        return {key: join(item, tensors) for key, item in rest.items()}
    if type(rest) in (list, tuple):
        return type(rest)(join(item, tensors) for item in rest)
    return copy.deepcopy(rest)
