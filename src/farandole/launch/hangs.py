# The launcher's side of hangs: gets reports of waiting operations, asks all agents what their ranks do, warns once.
# Touches the connections to the agents, and the report's files; observe/hangs.py finds the cause.
"""`Hangs` is a part of a job and runs on its loop. `examine(then)` asks at any time."""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from farandole.launch.agents import Agents
from farandole.launch.outcome import Outcome
from farandole.observe import hangs
from farandole.observe.facts import Facts
from farandole.observe.hangs import Verdict
from farandole.observe.records import Record
from farandole.observe.report import Report
from farandole.rendezvous import agent_messages

ANSWER_SECONDS = 2.0  # for all agents; then those that are silent have as long again, because a machine may be busy
LOST_SECONDS = 6.0
AGAIN_SECONDS = (2.0, 5.0, 15.0, 30.0)  # between the examinations of one hang; the last one repeats
KEPT_SECONDS = 30.0  # for which a slow rank or link that was named counts
DEFAULT_WARNING_SECONDS = 60.0
KEPT_RECORDS = 1024  # of ranks that failed
CODE = 1  # of a job that was killed because it hung
ON_HANG = ("report", "dump", "kill")

log = logging.getLogger("farandole")


class RanksOfJob(Protocol):
    """What is asked about the ranks."""

    def running(self) -> list[int]: ...
    def rank_of(self, rank: int) -> int: ...
    def host_of(self, rank: int) -> str: ...


@dataclass(frozen=True)
class OnHang:
    """What happens: "tell" tells the user, "report" also writes the report, "dump" also writes the last operations,
    "kill" does all that and ends the job when the hang has lasted for the time of stall warnings."""

    act: str = "tell"
    folder: Path | None = None  # for the reports; None: a new one among temporary files


class Hangs:
    """See the module."""

    def __init__(
        self, agents: Agents, ranks: RanksOfJob, outcome: Outcome, say: Callable[[str], None], on_hang: OnHang
    ) -> None:
        self._agents, self._ranks, self._outcome, self._say, self._on_hang = agents, ranks, outcome, say, on_hang
        self._loop = agents.loop
        self._slow: collections.deque[tuple[float, str]] = collections.deque(maxlen=8)
        self._waiting: set[int] = set()  # ranks with an operation that has waited for long
        self._began = 0.0  # when the first of them did
        self._hang: Verdict | None = None
        self._turns = 0  # examinations of this hang
        self._reports = 0
        self._folder = on_hang.folder
        self._number = 0  # of the running examination
        self._asked = 0.0
        self._missing: set[int] = set()
        self._answers: dict[int, Facts] = {}
        self._then: list[Callable[[Report], None]] = []  # who wants the result
        self.records: dict[int, Record] = {}  # what ranks that failed have left

    def note_warning(self, text: str) -> None:
        """The hub has warned the user, perhaps of a slow rank or link. Safe from any thread."""
        if " slow: " in text or "the link between" in text:
            self._slow.append((time.monotonic(), text))

    def on_report(self, report: agent_messages.RankWaits | agent_messages.Examined | agent_messages.Ended) -> None:
        """Handles a report of an agent."""
        if isinstance(report, agent_messages.RankWaits):
            self._rank_waits(report)
        elif isinstance(report, agent_messages.Examined):
            if report.number == self._number and report.rank in self._missing:
                self._answered(report)
        else:
            self._keep(report)
            self._waiting.discard(report.rank)
            if report.rank in self._missing:
                self._missing.discard(report.rank)
                if not self._missing:
                    self._finish()

    def _keep(self, report: agent_messages.Ended) -> None:
        if report.record and (known := Facts.read(report.rank, "", b"", report.record).record) is not None:
            self.records[report.rank] = known
            while len(self.records) > KEPT_RECORDS:
                del self.records[min(self.records)]

    def examine(self, then: Callable[[Report], None]) -> None:
        """Asks all agents; `then(report)` is called with the result."""
        self._then.append(then)
        if self._number == 0 or not self._missing:
            self._ask()

    def _rank_waits(self, report: agent_messages.RankWaits) -> None:
        if report.waited_ms == 0:
            self._waiting.discard(report.rank)
            if not self._waiting:
                self._over()
            return
        if not self._waiting:
            self._began = time.monotonic() - report.waited_ms / 1000
            self._turns = 0
            # The others wait too, and will say so in a moment.
            self._loop.at("hang", time.monotonic() + 0.02, self._check)
        self._waiting.add(report.rank)

    def _over(self) -> None:
        self._loop.at("hang", None, lambda: None)
        hang, self._hang = self._hang, None
        if hang is not None and not self._outcome.stopped:
            name = f"{hang.operation!r}" if hang.operation else "the operation"
            self._say(f"hang: over, {name} went on after {time.monotonic() - self._began:.1f} s")

    def _check(self) -> None:
        if self._waiting and not self._outcome.stopped:
            self.examine(self._judged)

    def _judged(self, report: Report) -> None:
        if not self._waiting or self._outcome.stopped:
            return
        verdict = report.verdict
        lasted = time.monotonic() - self._began
        pause = AGAIN_SECONDS[min(self._turns, len(AGAIN_SECONDS) - 1)]
        self._turns += 1
        known = self._hang is not None and verdict.same_as == self._hang.same_as
        limit = self._limit(report)
        kill = self._on_hang.act == "kill" and verdict.names_a_cause
        if verdict.names_a_cause and (not known or (kill and lasted >= limit)):
            self._hang = verdict
            path = self._write(report)
            self._say(f"hang: {verdict.text}" + (f"\nThe report is in {path}" if path is not None else ""))
        if kill:
            if lasted >= limit:
                first = verdict.text.partition("\n")[0]
                self._outcome.fail(CODE, f"ended by --on-hang kill after {lasted:.0f} s ({verdict.kind}): {first}")
                return
            pause = min(pause, limit - lasted)
        self._loop.at("hang", time.monotonic() + pause, self._check)

    def _limit(self, report: Report) -> float:
        known = [one.record.warning_seconds for one in report.ranks.values() if one.record is not None]
        return max(known, default=0.0) or DEFAULT_WARNING_SECONDS

    def _write(self, report: Report) -> Path | None:
        if self._on_hang.act == "tell":
            return None
        self._reports += 1
        with contextlib.suppress(OSError):
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="farandole-hang-"))
            return report.write(self._folder, f"hang-{self._reports}", self._on_hang.act in ("dump", "kill"))
        return None

    # An examination.

    def _ask(self) -> None:
        self._number += 1
        self._asked = time.monotonic()
        self._answers = {}
        self._missing = set(self._ranks.running())
        for connection in self._agents.connections.values():
            connection.send(agent_messages.Examine(self._number))
        self._loop.at("examined", self._asked + ANSWER_SECONDS, functools.partial(self._late, self._asked))
        if not self._missing:
            self._finish()

    def _answered(self, report: agent_messages.Examined) -> None:
        self._missing.discard(report.rank)
        facts = Facts.read(self._ranks.rank_of(report.rank), self._ranks.host_of(report.rank), report.facts,
                           report.record)  # fmt: skip
        self._answers[facts.rank] = _newer(self._answers.get(facts.rank), facts)
        if not self._missing:
            self._finish()

    def _late(self, asked: float) -> None:
        left = asked + LOST_SECONDS - time.monotonic()
        if left > 0:
            self._loop.at("examined", asked + LOST_SECONDS, self._finish)
        else:
            self._finish()

    def _finish(self) -> None:
        self._loop.at("examined", None, lambda: None)
        lost = tuple(sorted(self._ranks.rank_of(one) for one in self._missing))
        self._missing = set()
        now = time.monotonic()
        slow = [text for when, text in self._slow if now - when < KEPT_SECONDS]
        then, self._then = self._then, []
        try:
            verdict = hangs.judge(self._answers, lost, slow)
            report = Report(verdict, self._answers, lost, now - self._asked)
            for each in then:
                each(report)
        except Exception:  # a job must not end because nobody understands what its ranks do
            log.exception("the ranks were examined without a result")


def _newer(known: Facts | None, found: Facts) -> Facts:
    """An elastic job can have two processes with one rank. This gives the process of the later generation."""
    if known is None or known.record is None:
        return found
    return found if found.record is not None and found.record.generation >= known.record.generation else known
