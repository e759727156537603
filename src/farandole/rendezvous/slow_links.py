# Which link is slow: a policy over what the ranks of one round have sent each other, and at which rate.
# Pure: numbers come in, sentences come out.
"""A link is slow when something is on its way for most of the time and others carry as much in a fraction of it.

All links alike are a network at its limit: nobody is named. Where there is no other to compare with, it has to be busy
by the kernel's rate as well, and the sentence says what it carries and not that it is slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

BUSY = 0.5  # of the time: less does not hold a job up
TIMES = 2  # in a row, before a link is named
FACTOR = 3  # by so much others are quicker
COMPARABLE = 8  # others carry at least this part of its bytes
SHOWN = 3

Pair: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Load:
    """What went over a link, in its busier direction."""

    share: float  # of the time something was on its way
    least: float  # of the time, at the rate that the kernel saw last
    carried: int  # kB
    rate: float  # kB per second


class SlowLinks:
    """One round's links. One is named once, and again only after it has been as quick as the others."""

    def __init__(self, hosts: Sequence[str]) -> None:
        """`hosts`: the name of each rank's host."""
        self._hosts = hosts
        self._reports: dict[int, dict[int, Load]] = {}
        self._seen: list[frozenset[Pair]] = []
        self._named: frozenset[Pair] = frozenset()

    def heard(self, rank: int, of_ms: int, links: Sequence[int]) -> str | None:
        """A rank's report as rates.py makes it. A sentence when a link is to be named."""
        rows = zip(*(links[place::4] for place in range(4)), strict=False)
        self._reports[rank] = {
            peer: Load(min(1.0, busy / max(1, of_ms)), min(1.0, least / max(1, of_ms)), kb, 1e3 * kb / max(1, busy))
            for peer, busy, least, kb in rows
            if 0 <= peer < len(self._hosts) and peer != rank and min(busy, least, kb) >= 0
        }
        if len(self._reports) < len(self._hosts):
            return None
        loads = self._loads()
        self._reports.clear()
        self._seen = [*self._seen, frozenset(pair for pair in loads if _is_slow(pair, loads))][-TIMES:]
        if len(self._seen) < TIMES:
            return None
        if not any(self._seen):
            self._named = frozenset()
        slow = frozenset.intersection(*self._seen)
        if not slow or slow <= self._named:
            return None
        self._named |= slow
        return self._sentence(sorted(slow), loads)

    def _loads(self) -> dict[Pair, Load]:
        found: dict[Pair, Load] = {}
        for rank, peers in self._reports.items():
            for peer, load in peers.items():
                pair = (min(rank, peer), max(rank, peer))
                if pair not in found or found[pair].share < load.share:
                    found[pair] = load
        return found

    def _sentence(self, slow: Sequence[Pair], loads: dict[Pair, Load]) -> str:
        shown = [f"{self._place(one)} and {self._place(other)}" for one, other in slow[:SHOWN]]
        more = f", and {len(slow) - SHOWN} more" if len(slow) > SHOWN else ""
        what = ("the link between " if len(slow) == 1 else "the links between ") + ", ".join(shown) + more
        common = set.intersection(*({self._hosts[rank] for rank in pair} for pair in slow))
        if len(slow) > 1 and len(common) == 1:
            what += f" (all of them of {common.pop()})"
        busiest = max(slow, key=lambda pair: loads[pair].share)
        load = loads[busiest]
        other = max((loads[pair].rate for pair in _comparable(busiest, loads)), default=0.0)
        rates = f"{_rate(load.rate)}, and sending takes {load.share:.0%} of the time"
        if not other:
            return f"{what} is what the ranks wait for: it carries {rates}"
        verb = "is" if len(slow) == 1 else "are"
        return f"{what} {verb} slow: {rates}; others carry {_rate(other)}"

    def _place(self, rank: int) -> str:
        return f"rank {rank} on {self._hosts[rank]}"


def _comparable(pair: Pair, loads: dict[Pair, Load]) -> list[Pair]:
    """Other links that have carried as much, more or less."""
    return [other for other in loads if other != pair and COMPARABLE * loads[other].carried >= loads[pair].carried]


def _is_slow(pair: Pair, loads: dict[Pair, Load]) -> bool:
    if loads[pair].share < BUSY:
        return False
    others = [loads[other].rate for other in _comparable(pair, loads)]
    if not others:
        return loads[pair].least >= BUSY
    return max(others) >= FACTOR * loads[pair].rate


def _rate(kilobytes: float) -> str:
    return f"{kilobytes / 1e3:.1f} MB/s"
