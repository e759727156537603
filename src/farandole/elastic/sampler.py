# The order of the samples of an epoch, and which rank takes which samples.
# Pure functions of seed, epoch, cursor and number of ranks. Touches only NumPy.
"""Only the position in the order must be remembered, so ranks may join or leave between any two steps.

>>> [share.count for share in shares(cursor=8, length=11, batches=4, batch_size=2)]
[1, 1, 1, 0]
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64: different inputs give different numbers, distributed over all 64 bits."""
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed


def mixed_seed(*numbers: int) -> int:
    """A seed of 63 bits from several numbers. It is the same on every machine and in every version."""
    state = np.zeros(1, dtype=np.uint64)
    for number in numbers:
        state = _mixed(state + _GOLDEN + np.array([number & _MASK], dtype=np.uint64))
    return int(state[0]) >> 1


def order(length: int, seed: int, epoch: int, shuffle: bool = True) -> NDArray[np.int64]:
    """The samples of an epoch in the order in which they are taken.

    They are sorted by a hash of (seed, epoch, number), not by the random generator of a library. So a cursor in a
    checkpoint means the same samples in every version.
    """
    if not shuffle:
        return np.arange(length, dtype=np.int64)
    start = np.uint64(mixed_seed(seed, epoch))
    keys = _mixed(start + _GOLDEN * np.arange(1, length + 1, dtype=np.uint64))
    return np.argsort(keys, kind="stable").astype(np.int64)


def horovod_order(length: int, seed: int, epoch: int, shuffle: bool = True) -> list[int]:
    """The order that Horovod's ElasticSampler must have."""
    indices = list(range(length))
    if shuffle:
        random.Random(seed + epoch).shuffle(indices)
    return indices


@dataclass(frozen=True)
class Share:
    """One part of a step: `count` samples of the order, beginning at `start`."""

    start: int
    count: int
    total: int  # the number of samples of the whole step

    @property
    def weight(self) -> float:
        """The share of this part in the samples of the step; 0 for a part without samples."""
        return self.count / self.total


def shares(cursor: int, length: int, batches: int, batch_size: int) -> list[Share]:
    """The step at `cursor` in `batches` parts: full batches, or the samples that are left, as evenly as possible."""
    total = min(batches * batch_size, length - cursor)
    if total <= 0:
        return []
    least, more = divmod(total, batches)
    counts = [least + (part < more) for part in range(batches)]
    starts = np.cumsum([0, *counts[:-1]])
    return [Share(cursor + int(start), count, total) for start, count in zip(starts, counts, strict=True)]


def next_cursor(cursor: int, length: int, batches: int, batch_size: int) -> int:
    """The cursor of the next step."""
    return min(cursor + batches * batch_size, length)


def share_of_rank(count: int, rank: int, size: int) -> range:
    """Which of `count` items belong to a rank: a contiguous range, about equally long for each rank."""
    return range(count * rank // size, count * (rank + 1) // size)
