# Who is slow: a policy over the shares of time that the ranks of one round spend waiting for each other.
# Pure: time comes in as numbers, sentences come out.
"""In step with each other, the slow rank hardly waits and all others wait for it; those shares alone tell who it is."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

REPORT_SECONDS = 2.0  # how often a rank says how long it has waited
RANKS_PER_SECOND = 32  # more ranks report less often: the hub reads every word
GAP = 0.3  # by so much of the time the others wait more than those who are slow
TIMES = 2  # in a row, before anybody is named


def report_seconds(size: int) -> float:
    """The time between two reports of a rank in a job of this size."""
    return max(REPORT_SECONDS, size / RANKS_PER_SECOND)


class Stragglers:
    """One round's shares. A rank is named once, and again only after it has been as quick as the others."""

    def __init__(self, places: Sequence[str]) -> None:
        """`places`: the name of each rank, in words."""
        self._places = places
        self._shares: dict[int, float] = {}
        self._seen: list[frozenset[int]] = []  # who was slow at the last judgements
        self._named: frozenset[int] = frozenset()

    def heard(self, rank: int, share: float) -> str | None:
        """A rank has waited for this share of the time. A sentence when somebody is to be named."""
        self._shares[rank] = min(1.0, max(0.0, share))
        if len(self._shares) < len(self._places):
            return None
        slow, waiting = self._judge()
        self._shares.clear()
        self._seen = [*self._seen, slow][-TIMES:]
        if len(self._seen) < TIMES or len(set(self._seen)) > 1:
            return None
        before, self._named = self._named, slow
        if not slow or slow == before:
            return None
        who = ", ".join(self._places[rank] for rank in sorted(slow))
        verb, whom = ("is", "it") if len(slow) == 1 else ("are", "them")
        return f"{who} {verb} slow: the others wait for {whom} {waiting:.0%} of the time"

    def _judge(self) -> tuple[frozenset[int], float]:
        """The ranks below the widest gap, if it is wide and they are fewer than the rest; how long the rest waits."""
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
