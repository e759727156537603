# Finds slow links from what the ranks of one round have sent each other, and at which rate.
# Pure: its input is numbers, its output sentences.
"""A link is slow when it is busy most of the time and other links carry as much in a fraction of that time.

If all links are alike the network is at its limit, and no link is named. A link without another to compare with must
also be busy by the kernel's rate; the warning then says what it carries and not that it is slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

BUSY = 0.5  # share of the time; less does not slow a job down
TIMES = 2  # reports in a row before a link is named
FACTOR = 3  # how many times faster other links are
COMPARABLE = 8  # a link is compared with links that carried at least its bytes divided by this
SHOWN = 3  # links that a warning names

Pair: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Load:
    """The traffic of a link in its busier direction."""

    share: float  # part of the time in which data was in flight
    least: float  # part of the time, at the last rate of the kernel
    carried: int  # kB
    rate: float  # kB per second


class SlowLinks:
    """The links of one round. A slow link is named once, and again only after it was as fast as the others."""

    def __init__(self, hosts: Sequence[str]) -> None:
        """`hosts`: the name of each rank's host."""
        self._hosts = hosts
        self._reports: dict[int, dict[int, Load]] = {}
        self._seen: list[frozenset[Pair]] = []
        self._named: frozenset[Pair] = frozenset()

    def add_report(self, rank: int, measured_over_ms: int, links: Sequence[int]) -> str | None:
        """Adds a rank's report from rates.py. Returns a warning if a link is slow, else None."""
        period_ms = max(1, measured_over_ms)
        rows = zip(*(links[index::4] for index in range(4)), strict=False)
        self._reports[rank] = {
            peer: Load(min(1.0, busy / period_ms), min(1.0, least / period_ms), kb, 1e3 * kb / max(1, busy))
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
    """Other links that have carried about as much."""
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
