# The summary at the end of a job: time, ranks, deaths, the slowest rank, memory, one piece of advice.
# Pure but for the path of this Python: it gets what the launcher knows and returns text and data.
"""`Account` is what is known; `lines()` is what `farandole run` prints, `data()` is the file of --json."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from farandole.launch.blame import Ending, Verdict

MUCH_WAITING = 0.3  # of the time of the other ranks
LITTLE_WAITING = 0.1  # of the time of the rank that they wait for
LONG_S = 10.0  # shorter jobs get no advice about their speed


@dataclass
class Account:
    """What the launcher knows when a job has ended. Ranks that never called init() report no facts."""

    command: Sequence[str]
    program: str
    code: int
    seconds: float
    ranks: int  # at the start
    endings: Sequence[Ending]  # those that are kept
    deaths: int
    generations: int  # 1 if the ranks never changed
    verdict: Verdict | None
    reason: str = ""
    other_python: str = ""  # the Python of the ranks, if it is that of another environment and lacks a package
    name: Callable[[int], int] = field(default=lambda rank: rank)  # the rank of a worker of an elastic job

    def _facts(self) -> list[Ending]:
        return [one for one in self.endings if one.lived > 0]

    def slowest(self) -> tuple[int, float] | None:
        """The rank for which the others wait, and the share of their time; None if they wait for nobody."""
        shares = {one.rank: one.waited / one.lived for one in self._facts()}
        if len(shares) < 2:
            return None
        rank = min(shares, key=lambda one: shares[one])
        others = [share for one, share in shares.items() if one != rank]
        waiting = sum(others) / len(others)
        return (self.name(rank), waiting) if waiting > MUCH_WAITING and shares[rank] < LITTLE_WAITING else None

    def advice(self) -> str:
        """One sentence, or ""."""
        if self.code and self.other_python and not self._facts():
            return (
                f"the ranks ran {self.other_python}, which is not the Python of this program: {sys.executable}. "
                "Install the package there, or write the path of the Python that has it"
            )
        killed = self.verdict is not None and self.verdict.code > 128 and not self.verdict.by_themselves
        if killed and self.deaths and self.generations == 1:
            return "a job with --min-np goes on when a rank dies: docs/elastic.md"
        slow = self.slowest()
        if slow is not None and self.seconds > LONG_S:
            return (
                f"--log-dir DIR keeps a timeline, and `farandole trace` says for what the ranks wait for rank {slow[0]}"
            )
        return ""

    def lines(self) -> list[str]:
        """At most three lines; none if the job went well and was no program in Python."""
        facts = self._facts()
        if not facts and not self.code:
            if self.ranks == 1 or not os.path.basename(self.command[0]).startswith("python"):
                return []
            return [f"{self.ranks} ranks ended well after {duration(self.seconds)}; no rank called init()"]
        how = "ended well" if not self.code else f"ended with exit code {self.code}"
        parts = [f"{self.ranks} ranks {how} after {duration(self.seconds)}"]
        if self.generations > 1:
            parts.append(f"{self.deaths} deaths, {self.generations - 1} times the ranks changed")
        if facts:
            most = max(facts, key=lambda one: one.peak_kb)
            parts.append(f"peak memory {most.peak_kb / 1024:.0f} MB (rank {self.name(most.rank)})")
        slow = self.slowest()
        found = ["; ".join(parts)]
        if slow is not None:
            found.append(f"slowest: rank {slow[0]}; the others waited {slow[1]:.0%} of their time")
        if advice := self.advice():
            found.append(f"advice: {advice}")
        return found

    def data(self) -> dict[str, Any]:
        """For --json."""
        slow = self.slowest()
        first = self.verdict
        return {
            "command": list(self.command),
            "exit_code": self.code,
            "seconds": round(self.seconds, 3),
            "ranks": self.ranks,
            "deaths": self.deaths,
            "generations": self.generations,
            "root_cause": None if first is None else {"rank": self.name(first.rank), "text": first.text},
            "reason": self.reason,
            "endings": [self._ending(one) for one in self.endings],
            "slowest_rank": None if slow is None else slow[0],
            "advice": self.advice(),
        }

    def _ending(self, one: Ending) -> dict[str, Any]:
        return {
            "rank": self.name(one.rank),
            "exit_code": one.code,
            "text": one.text,
            "peak_memory_mb": round(one.peak_kb / 1024, 1) if one.peak_kb else None,
            "seconds_in_job": round(one.lived, 3) if one.lived else None,
            "seconds_waited": round(one.waited, 3) if one.lived else None,
        }


def duration(seconds: float) -> str:
    """A time as people say it.

    >>> duration(3.21), duration(75), duration(7384)
    ('3.2 s', '1 min 15 s', '2 h 3 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
