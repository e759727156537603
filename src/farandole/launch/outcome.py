# How a job ends: the root cause, the time that the other ranks have to end by themselves, then signals for all.
# Touches timers of the loop, and ranks through their agents; blame.py finds the root cause.
"""`Outcome.failure` is None while no rank has failed. All methods run in the loop."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence

from farandole.launch import blame
from farandole.launch.agents import Agents
from farandole.launch.blame import Ending
from farandole.launch.plan import Plan

GRACE_SECONDS = 2.0  # between SIGTERM and SIGKILL when a rank has failed
# Sections of docs/errors.md.
AGENT_LOST, ELASTIC_OVER, LAUNCHER_BROKEN = "agent-lost", "elastic-over", "launcher-broken"
KEPT_ENDINGS = 64  # of an elastic job: endings from which the root cause is found when the job fails
ROOT_CAUSE_WAIT_SECONDS = 2.0  # how long we wait for a rank that another failed rank blames to end as well


class Outcome:
    """See the module. `on_stop` is called before the ranks get a signal."""

    def __init__(self, plan: Plan, agents: Agents, on_stop: Callable[[], None]) -> None:
        # The rank that is the root cause, and its exit code; -1: no rank is the root cause.
        self.failure: tuple[int, int] | None = None
        self.reason = ""  # why the job failed, if no rank is the root cause
        self.endings: list[Ending] = []
        self.deaths = 0  # endings with another code than 0 that nobody had asked for
        self.runs: Callable[[], int] = lambda: 0  # how many generations of an elastic job have run
        self.stopped = False  # the launcher has told the ranks to end
        self.ends_soon = False  # the job must end soon, even if nobody reads its output
        self._endings_of = 0  # the value of `runs()` when the oldest of `endings` happened
        self._plan = plan
        self._agents = agents
        self._loop = agents.loop
        self._on_stop = on_stop
        self._waiting_for_root_cause = False
        self._survivors_may_end = False  # a rank has failed or was lost; the others have some time to end by themselves
        self._decided = False  # the root cause is known; what other ranks report later does not change it

    @property
    def verdict(self) -> blame.Verdict | None:
        """Which rank is the root cause; None when no rank has failed."""
        return blame.judge(self.endings) if self._endings_of == self.runs() else None

    @property
    def alone(self) -> str:
        """The framework with which each rank trained without the others, if the job succeeded; else ""."""
        found = [ending.alone for ending in self.endings]
        ended_well = self.failure is None and not self.stopped
        return found[0] if ended_well and len(found) > 1 and all(found) else ""

    def worker_ended(self, ending: Ending) -> None:
        """A worker of an elastic job has ended. Those that failed before the last generation began were replaced."""
        runs = self.runs()
        self.deaths += ending.failed
        self.endings = [*(self.endings[-KEPT_ENDINGS:] if self._endings_of == runs else []), ending]
        self._endings_of = runs

    def rank_ended(self, ending: Ending, running: Sequence[int]) -> None:
        """A rank of a fixed job has ended; `running`: the ranks that still run."""
        self.endings.append(ending)
        self.deaths += ending.failed
        if not ending.failed:
            return
        if not blame.root_cause_running(self.endings, running):
            self._judge()
        elif not self._waiting_for_root_cause:
            self._waiting_for_root_cause = True
            self._loop.at("root cause", time.monotonic() + ROOT_CAUSE_WAIT_SECONDS, self._judge)

    def agent_lost(self, text: str) -> None:
        """An agent was lost, and its ranks with it. The other ranks notice it themselves."""
        if not self.stopped:
            self._decided = True
            self._fail(-1, 1, f"{text} [{AGENT_LOST}]")
            if self._plan.stop_on_failure:
                self._let_survivors_end()
            else:
                self.stop(GRACE_SECONDS)

    def fail(self, code: int, reason: str, topic: str = "") -> None:
        """The job fails, and no rank is the root cause. `topic`: a section of docs/errors.md."""
        if not self.stopped:
            self._fail(-1, code, f"{reason} [{topic}]" if topic else reason)
            self.stop(GRACE_SECONDS)

    def finish(self, failed: bool, text: str) -> None:
        """The elastic driver says that the job has ended."""
        if self.stopped:
            return
        if failed:
            verdict = self.verdict
            self.failure = (verdict.rank, verdict.code) if verdict is not None else (-1, 1)
            self.reason = f"{text} [{ELASTIC_OVER}]" if text else ""
        # The driver has waited until the ranks of the last generation reported and ended. The workers that are left
        # wait for ranks that will not come.
        self.stop(GRACE_SECONDS)

    def stop(self, grace: float, number: int = signal.SIGTERM) -> None:
        """Sends `number` to all ranks, and kills those that still run after `grace` seconds."""
        self._on_stop()
        self.stopped = True
        for timer in ("root cause", "survivors"):
            self._loop.at(timer, None, lambda: None)
        self._agents.signal_all(number if grace > 0 else signal.SIGKILL)
        if grace > 0:
            self._loop.at("kill", time.monotonic() + grace, lambda: self._agents.signal_all(signal.SIGKILL))

    def broken(self, trace: str) -> None:
        """The launcher itself has failed."""
        self.stopped = True
        self.failure = (-1, 1)
        self.reason = f"the launcher itself has failed; please report this:\n{trace.rstrip()} [{LAUNCHER_BROKEN}]"

    def all_ended(self) -> None:
        """No rank runs any more: what is known now is final."""
        if not self.stopped and not self._decided and (verdict := self.verdict) is not None:
            self.failure = (verdict.rank, verdict.code)

    def _judge(self) -> None:
        self._loop.at("root cause", None, lambda: None)
        verdict = self.verdict
        assert verdict is not None
        if not self.stopped:
            self._fail(verdict.rank, verdict.code, "")
            if self._plan.stop_on_failure:
                self._let_survivors_end()

    def _fail(self, rank: int, code: int, reason: str) -> None:
        if self.failure is None or (self.failure[0] != rank and (rank < 0 or not self._decided)):
            self.failure = (rank, code)
            self.reason = reason

    def _let_survivors_end(self) -> None:
        """The other ranks notice the failure themselves. A signal now would interrupt their reports about it."""
        if not self._survivors_may_end:
            self._survivors_may_end = True
            end = time.monotonic() + self._plan.survivor_grace
            self._loop.at("survivors", end, lambda: self.stop(GRACE_SECONDS))
