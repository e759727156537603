# Finds slow ranks from the share of time that each rank of one round waits for the others.
# Pure: its input is numbers, its output sentences.
"""The slow rank hardly waits and all others wait for it, so the shares show which one it is."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

REPORT_SECONDS = 2.0  # how often a rank reports how long it has waited
RANKS_PER_SECOND = 32  # larger jobs report less often, because the hub reads every report
GAP = 0.3  # the others wait longer than the slow ranks by this share of the time
TIMES = 2  # reports in a row before a rank is named


def report_seconds(size: int) -> float:
    """The time between two reports of a rank in a job of this size."""
    return max(REPORT_SECONDS, size / RANKS_PER_SECOND)


class Stragglers:
    """The shares of one round. A slow rank is named once, and again only after it was as fast as the others."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names`: the text that names each rank."""
        self._names = names
        self._shares: dict[int, float] = {}
        self._seen: list[frozenset[int]] = []  # who was slow in the last reports
        self._named: frozenset[int] = frozenset()

    def add_report(self, rank: int, share: float) -> str | None:
        """Adds the share of the time that a rank has waited. Returns a warning if a rank is slow, else None."""
        self._shares[rank] = min(1.0, max(0.0, share))
        if len(self._shares) < len(self._names):
            return None
        slow, waiting = self._slow_ranks()
        self._shares.clear()
        self._seen = [*self._seen, slow][-TIMES:]
        if len(self._seen) < TIMES or len(set(self._seen)) > 1:
            return None
        before, self._named = self._named, slow
        if not slow or slow == before:
            return None
        who = ", ".join(self._names[rank] for rank in sorted(slow))
        verb, whom = ("is", "it") if len(slow) == 1 else ("are", "them")
        return f"{who} {verb} slow: the others wait for {whom} {waiting:.0%} of the time"

    def _slow_ranks(self) -> tuple[frozenset[int], float]:
        """The ranks that wait much less than the others, and the average share of the time that the others wait.

        Slow are the ranks below the widest gap between two shares, if it is at least GAP and they are the minority.
        """
        order = sorted(self._shares, key=lambda rank: self._shares[rank])
        values = [self._shares[rank] for rank in order]
        gaps = [after - before for before, after in itertools.pairwise(values)]
        if not gaps or max(gaps) < GAP:
            return frozenset(), 0.0
        cut = gaps.index(max(gaps)) + 1
        if 2 * cut > len(order):
            return frozenset(), 0.0
        rest = values[cut:]
        return frozenset(order[:cut]), sum(rest) / len(rest)
