# The ledger of elastic tests: counts how often the committed model has used each sample of each epoch.
# Touches only NumPy.
"""`take` records the samples of a step; `copy` and assignment make commits and restore them; `verdict` counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Verdict:
    """How many samples were never used, used again without being marked, and used again as marked padding."""

    lost: int
    duplicated: int
    padded: int


class Ledger:
    """Counts of samples and of marked repetitions. Each row is an epoch."""

    def __init__(self, length: int, epochs: int) -> None:
        self.used: NDArray[np.int64] = np.zeros((epochs, length), dtype=np.int64)
        self.padded: NDArray[np.int64] = np.zeros((epochs, length), dtype=np.int64)

    def take(self, epoch: int, indices: Iterable[int], padded: Iterable[int] = ()) -> None:
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

    def verdict(self) -> Verdict:
        """The result over all epochs. The padding is that of the worst epoch."""
        return judge(self.used, self.padded)


def judge(used: Any, padded: Any) -> Verdict:
    used, padded = np.asarray(used), np.asarray(padded)
    worst = int(padded.sum(axis=1).max()) if padded.size else 0
    return Verdict(int((used == 0).sum()), int((used > 1).sum()), worst)
