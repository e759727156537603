# A job: its thread, its output, the calls to its ranks, and its end. Its ranks are fixed (fixed.py) or elastic.
# Touches a thread and a loop; agents, ranks, output and the root cause have files of their own.
"""`Job(plan, sink)` starts a job; `wait()` returns the exit code of the rank that is the root cause, or 0."""

from __future__ import annotations

import logging
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from farandole.launch import blame
from farandole.launch.agent_connection import AgentConnection, Pump
from farandole.launch.agents import Agents
from farandole.launch.elastic import ElasticRanks
from farandole.launch.fixed import FixedRanks
from farandole.launch.hangs import Hangs, OnHang
from farandole.launch.outcome import GRACE_SECONDS, Outcome
from farandole.launch.output import Sink
from farandole.launch.output_relay import OutputRelay
from farandole.launch.plan import ElasticOptions, Plan
from farandole.observe.records import Record
from farandole.observe.report import Report
from farandole.rendezvous import agent_messages
from farandole.rendezvous.flow import Loop
from farandole.rendezvous.secret import Secret

J = TypeVar("J", bound="Job")
log = logging.getLogger("farandole")


class Ranks(Protocol):
    """What a job needs of its ranks. In an elastic job a rank's number is the number of its worker."""

    codes: list[int | None]
    pids: list[int]
    on_warning: Callable[[str], None]

    @property
    def refused(self) -> int: ...
    @property
    def joined(self) -> bool: ...
    def rank_of(self, rank: int) -> int: ...
    def host_of(self, rank: int) -> str: ...
    def pid_of(self, rank: int) -> int: ...
    def status_text(self) -> str: ...
    def running(self) -> list[int]: ...
    def runs(self, rank: int) -> bool: ...
    def going_on(self) -> bool: ...
    def connection(self, rank: int) -> AgentConnection | None: ...
    def start(self) -> None: ...
    def on_report(self, connection: AgentConnection, report: Any) -> None: ...
    def lost(self, connection: AgentConnection, reason: str) -> None: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...


class Job:
    """A running job. Use it as a context manager: at the end of the block it kills what still runs and cleans up.

    `elastic`: makes it a job whose ranks change; None: the ranks of the plan. `say`: prints a line for the user; None:
    hangs go to the log, and other lines are dropped. The functions `on_...` are called on the job's thread: for each
    piece of a call, for each rank that ends without a failure, at the end of the job, and for each worker of an elastic
    job that has started. `on_started` is called before all of them, on the thread that makes the job, when the agents
    have received the commands to start the ranks.
    """

    def __init__(
        self,
        plan: Plan,
        sink: Sink,
        say: Callable[[str], None] | None = None,
        *,
        on_hang: OnHang = OnHang(),  # noqa: B008 (it is frozen)
        elastic: ElasticOptions | None = None,
        on_call: Callable[[agent_messages.Call], None] = lambda piece: None,
        on_ended: Callable[[int, int], None] = lambda rank, code: None,
        on_over: Callable[[], None] = lambda: None,
        on_running: Callable[[int], None] = lambda worker: None,
        on_started: Callable[[], None] = lambda: None,
    ) -> None:
        report_hang = say or log.warning  # a hang is always reported
        say = say or (lambda line: None)
        self._say = say
        self._on_call = on_call
        self._on_over = on_over
        self._loop = Loop()
        self._agents = Agents(
            self._loop, plan.connector, plan.secret or Secret.create(), self._on_report, self._agent_lost
        )
        self._outcome = Outcome(plan, self._agents, on_stop=lambda: self._ranks.stop())
        self._output = OutputRelay(self._loop, sink, self._outcome.fail)
        parts = (plan, self._agents, self._outcome, say, on_ended)
        self._ranks: Ranks = FixedRanks(*parts) if elastic is None else ElasticRanks(elastic, on_running, *parts)
        self._hangs = Hangs(self._agents, self._ranks, self._outcome, report_hang, on_hang)
        self._ranks.on_warning = self._hangs.note_warning
        self._pumps: dict[int, Pump] = {}
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._closed = False
        try:
            self._ranks.start()
            on_started()
            self._thread = threading.Thread(target=self._run, name="farandole-job", daemon=True)
            self._thread.start()
        except BaseException:
            self.close()
            raise

    # Methods for users, safe from any thread. `rank` is the worker's number in an elastic job.

    @property
    def codes(self) -> list[int | None]:
        """The exit code of each rank, 128 + signal if it was killed; None while it runs. Empty for an elastic job."""
        return self._ranks.codes

    @property
    def pids(self) -> list[int]:
        """The process id of each rank. Empty for an elastic job."""
        return self._ranks.pids

    @property
    def failure(self) -> tuple[int, int] | None:
        """The rank that is the root cause, and its exit code; -1: no rank is the root cause. None without failure."""
        return self._outcome.failure

    @property
    def reason(self) -> str:
        """Why the job failed, if no rank is the root cause."""
        return self._outcome.reason

    @property
    def verdict(self) -> blame.Verdict | None:
        """Which rank is the root cause; None when no rank has failed."""
        return self._outcome.verdict

    @property
    def endings(self) -> list[blame.Ending]:
        """How the ranks ended; of an elastic job, those of its last generation."""
        return self._outcome.endings

    @property
    def deaths(self) -> int:
        """How many ranks ended with another code than 0 without being told to."""
        return self._outcome.deaths

    @property
    def generations(self) -> int:
        """How many generations have run; at least 1."""
        return max(1, self._outcome.runs())

    @property
    def alone(self) -> str:
        """The framework with which each rank trained without the others, if none called init(); else ""."""
        return "" if self._ranks.joined else self._outcome.alone

    @property
    def refused(self) -> int:
        """How many unauthenticated connections the hub has refused."""
        return self._ranks.refused

    @property
    def directory(self) -> str:
        """The private directory of the job on this host; "" when no rank runs here."""
        here = self._agents.connections.get("")
        return here.directory if here is not None else ""

    @property
    def stuck(self) -> bool:
        """Whether the last output could not be written, because nobody reads it."""
        return self._output.stuck

    @property
    def over(self) -> bool:
        """Whether the job has ended: no rank will answer any more."""
        return self._over.is_set()

    def rank_of(self, rank: int) -> int:
        """The present rank of a worker of an elastic job, or its last rank if it has ended."""
        return self._ranks.rank_of(rank)

    def host_of(self, rank: int) -> str:
        """The name of a rank's host."""
        return self._ranks.host_of(rank)

    def pid_of(self, rank: int) -> int:
        """The process id of a rank."""
        return self._ranks.pid_of(rank)

    def status_text(self) -> str:
        """The state of the job, in a few words."""
        return self._ranks.status_text()

    def wait(self, timeout: float | None = None) -> int:
        """Waits until all ranks have ended. Returns the exit code of the root cause, or 0. TimeoutError if late."""
        if not self._over.wait(timeout):
            raise TimeoutError(f"after {timeout} s these ranks still run: {self._ranks.running()}")
        return self.failure[1] if self.failure is not None else 0

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Sends a signal to one rank."""

        def act() -> None:
            connection = self._ranks.connection(rank)
            if connection is not None:
                connection.send(agent_messages.Signal(rank, number, 0))

        self._loop.call(act)

    def stop(self, grace: float = GRACE_SECONDS, number: int = signal.SIGTERM) -> None:
        """Sends `number` to all ranks, and kills those that still run after `grace` seconds. Does not wait."""

        def act() -> None:
            self._outcome.ends_soon = True
            self._outcome.stop(grace, number)

        self._loop.call(act)

    def abandon(self) -> None:
        """Kills all ranks immediately."""
        self._outcome.stopped = self._outcome.ends_soon = True
        self._agents.cut_all()

    def send_call(self, rank: int, pieces: Iterator[agent_messages.Call]) -> None:
        """Sends pieces of a call to one rank, as fast as the rank reads them."""

        def act() -> None:
            connection = self._ranks.connection(rank) if self._ranks.runs(rank) else None
            if connection is not None:
                self._pumps.setdefault(rank, Pump(connection)).add(pieces)

        self._loop.call(act)

    @property
    def records(self) -> Mapping[int, Record]:
        """The last operations of ranks that failed."""
        return self._hangs.records

    def examine(self, then: Callable[[Report], None]) -> None:
        """Finds out what each rank does; calls `then(report)` on the job's thread, after at most a few seconds."""
        self._loop.call(lambda: self._hangs.examine(then))

    def finish_output(self, seconds: float) -> None:
        """Returns when all output that was received is written, or after `seconds`."""
        self._output.finish_received(seconds)

    def call_on_output_thread(self, act: Callable[[], None]) -> None:
        """Calls `act` soon on the thread that writes output, unless output waits there."""
        self._output.call_when_idle(act)

    def close(self) -> None:
        """Kills what still runs and leaves nothing behind. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._ranks.stop()
        self.abandon()
        if self._thread is not None:
            self._loop.call(lambda: None)
            self._thread.join()
        self._output.close()
        lost = self._agents.close()
        self._ranks.close()
        self._loop.close()
        self._over.set()
        if lost:
            self._say(f"no answer from {', '.join(lost)}: processes of this job may be left there")

    def __enter__(self: J) -> J:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # On the loop's thread.

    def _on_report(self, connection: AgentConnection, report: Any) -> None:
        self._ranks.on_report(connection, report)
        if isinstance(report, agent_messages.Output):
            self._output.add(connection, report)
        elif isinstance(report, agent_messages.Call):
            self._on_call(report)
        elif isinstance(report, agent_messages.CallCredit):
            if report.rank in self._pumps:
                self._pumps[report.rank].taken()
        elif isinstance(report, agent_messages.Ended):
            self._pumps.pop(report.rank, None)
            self._hangs.on_report(report)
        elif isinstance(report, agent_messages.RankWaits | agent_messages.Examined):
            self._hangs.on_report(report)

    def _agent_lost(self, connection: AgentConnection, reason: str) -> None:
        self._ranks.lost(connection, reason)

    def _run(self) -> None:
        try:
            while self._ranks.going_on() and not self._closed:
                self._loop.turn()
            self._output.finish(lambda: self._outcome.ends_soon, lambda: self._closed)
        except Exception:
            self._outcome.broken(traceback.format_exc())
        finally:
            self._outcome.all_ended()
            self._over.set()
            self._on_over()
