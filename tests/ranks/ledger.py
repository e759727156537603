# The ledger of elastic tests: how often the committed model has used each sample of each epoch.
# Touches only NumPy.
"""A commit stores a `copy()` of the ledger with the model, so that restoring the model also restores its ledger."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Counts:
    """`lost`: samples that were never used. `duplicated`: samples that were used more than once. `padded`: samples that
    were used again only to fill a batch, and marked as such.
    """

    lost: int
    duplicated: int
    padded: int


class Ledger:
    """How often each sample was used, and used as padding. A row is an epoch."""

    def __init__(self, length: int, epochs: int) -> None:
        self.used: NDArray[np.int64] = np.zeros((epochs, length), dtype=np.int64)
        self.padded: NDArray[np.int64] = np.zeros((epochs, length), dtype=np.int64)

    def record(self, epoch: int, indices: Iterable[int], padded: Iterable[int] = ()) -> None:
        """Records the samples of a step. `padded`: samples that only fill a batch; they are not in `indices`."""
        for index in indices:
            self.used[epoch, index] += 1
        for index in padded:
            self.padded[epoch, index] += 1

    def copy(self) -> Ledger:
        """A copy of the present state."""
        twin = Ledger(0, 0)
        twin.used, twin.padded = self.used.copy(), self.padded.copy()
        return twin

    def count(self) -> Counts:
        """Counts over all epochs. `padded` is that of the epoch with most padding."""
        return count(self.used, self.padded)


def count(used: Any, padded: Any) -> Counts:
    used, padded = np.asarray(used), np.asarray(padded)
    worst = int(padded.sum(axis=1).max()) if padded.size else 0
    return Counts(int((used == 0).sum()), int((used > 1).sum()), worst)
