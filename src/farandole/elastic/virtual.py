# Sums over virtual shards in the order of a fixed binary tree. The order does not depend on who holds which shards.
# Pure. Touches nothing.
"""Two neighbour nodes are added as soon as both halves of their parent node exist.

>>> def add(one, other): return f"({one}+{other})"
>>> tree = Tree(add)
>>> for shard in range(4): tree.push(shard, 1, str(shard))
>>> tree.nodes
[(0, 4, '((0+1)+(2+3))')]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Sum = TypeVar("Sum")


def checked_size(size: int) -> int:
    """The size; ValueError unless it is a power of two."""
    if size < 1 or size & (size - 1):
        raise ValueError(f"virtual_size={size}: expected a power of two")
    return size


class Tree(Generic[Sum]):
    """The largest nodes that can be made from the shards so far, from left to right."""

    def __init__(self, add: Callable[[Sum, Sum], Sum]) -> None:
        self._add = add
        self.nodes: list[tuple[int, int, Sum]] = []  # first shard, number of shards, their sum

    def push(self, first: int, width: int, value: Sum) -> None:
        """Adds a node. The caller adds nodes in the order of their shards."""
        self.nodes.append((first, width, value))
        while len(self.nodes) > 1:
            left, wide, one = self.nodes[-2]
            right, also, other = self.nodes[-1]
            if wide != also or left % (2 * wide) or left + wide != right:
                return
            self.nodes[-2:] = [(left, 2 * wide, self._add(one, other))]


def widths(shards: range) -> list[tuple[int, int]]:
    """The nodes that remain for a rank with these shards: first shard and number of shards of each."""
    tree: Tree[None] = Tree(lambda one, other: None)
    for shard in shards:
        tree.push(shard, 1, None)
    return [(first, width) for first, width, _ in tree.nodes]
