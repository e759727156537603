# A job: starts an agent on each host, runs the hub, starts the ranks through the agents, and ends all ranks together.
# Touches connections to agents, the hub, and a thread; decides through blame.py.
"""`Job(plan, sink)` starts a job; `wait()` returns the exit code of the rank that is the root cause, or 0."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from farandole.base.config import SETTINGS
from farandole.base.version import package_version
from farandole.launch import blame, environment, ssh
from farandole.launch.agent_connection import AgentConnection, Bridge, Pump, StartError
from farandole.launch.blame import Ending
from farandole.launch.output import Sink, Writer
from farandole.launch.slots import Place
from farandole.rendezvous import agent_messages, interfaces, sockets
from farandole.rendezvous.flow import Loop
from farandole.rendezvous.hub import Hub
from farandole.rendezvous.secret import Secret

GRACE_SECONDS = 2.0  # between SIGTERM and SIGKILL when a rank has failed
ROOT_CAUSE_WAIT_SECONDS = 2.0  # how long we wait for a rank that another failed rank blames to end as well
OUTPUT_SECONDS = 2.0  # how long we wait for somebody to read the output when the job must end
# The agent is told when this much of its output is written. It is far below the limit at which the agent waits.
ACKNOWLEDGE_BYTES = 128 << 10
PART_BYTES = 256 << 10  # one message carries this much of the variables or of the command
LONGEST_ENTRY = 1000 << 10  # the longest variable or word of the command
J = TypeVar("J", bound="Job")


@dataclass(frozen=True)
class Plan:
    """Everything about a job that is known before it starts."""

    command: Sequence[str]
    places: Sequence[Place]
    hosts: Sequence[str]  # where each rank runs; "" is this machine
    environ: Mapping[str, str]
    directory: str
    way: ssh.SshOptions | Bridge
    start_timeout: float = 30.0
    interfaces: tuple[str, ...] = ()
    threads: int | None = None  # OMP_NUM_THREADS of each rank
    calls: bool = False  # each rank gets a channel, on which it receives functions to call
    stop_on_failure: bool = True
    survivor_grace: float = SETTINGS["survivor_grace_seconds"].default  # seconds before the other ranks get SIGTERM
    extra: Sequence[Mapping[str, str]] = field(default_factory=tuple)  # additional variables of each rank
    of_host: Callable[[str], Mapping[str, str]] = lambda host: {}  # additional variables of the ranks on one host
    secret: Secret | None = None  # the job's secret, if the agents know it already


class Job:
    """A running job. Use it as a context manager: at the end of the block it kills what still runs and cleans up."""

    def __init__(
        self,
        plan: Plan,
        sink: Sink,
        say: Callable[[str], None] = lambda line: None,
        on_call: Callable[[agent_messages.Call], None] = lambda piece: None,
        on_ended: Callable[[int, int], None] = lambda rank, code: None,
        on_over: Callable[[], None] = lambda: None,
    ) -> None:
        self.size = len(plan.places)
        self.codes: list[int | None] = [None] * self.size
        self.pids: list[int] = [0] * self.size
        # The rank that is the root cause, and its exit code; -1: no rank is the root cause.
        self.failure: tuple[int, int] | None = None
        self.reason = ""  # why the job failed, if no rank is the root cause
        self.endings: list[Ending] = []
        self.asked: int | None = None  # the signal that somebody sent to an agent
        self.stuck = False  # the last output could not be written, because nobody reads it
        self._plan = plan
        self._sink = sink
        self._say = say
        self._on_call = on_call
        self._on_ended = on_ended
        self._on_over = on_over
        self._secret = plan.secret or Secret.create()
        self._loop = Loop()
        self._writer = Writer()
        self._unwritten = 0  # the number of messages with output that are not written yet
        self._acknowledge: dict[AgentConnection, int] = {}  # written bytes of each agent, which it was not told yet
        self._pumps: dict[int, Pump] = {}
        self._lines: dict[str, AgentConnection] = {}
        self._hub: Hub | None = None
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._stopped = False
        self._hurried = False  # the job must end soon, even if nobody reads its output
        self._waiting_for_confession = False
        self._survivors_may_end = False  # a rank has failed or was lost; the others have some time to end by themselves
        self._decided = False  # the root cause is known; what other ranks report later does not change it
        self._closed = False
        self._trouble: StartError | None = None
        self._waiting_for: set[object] = set()  # what must still happen before the job has started
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    # Methods for users, safe from any thread.

    @property
    def refused(self) -> int:
        """How many unauthenticated connections the hub has refused."""
        return self._hub.refused if self._hub is not None else 0

    @property
    def directory(self) -> str:
        """The private directory of the job on this host; "" when no rank runs here."""
        return self._lines[""].directory if "" in self._lines else ""

    def host_of(self, rank: int) -> str:
        """The name of a rank's host."""
        return self._plan.places[rank].hostname

    def pid_of(self, rank: int) -> int:
        """The process id of a rank."""
        return self.pids[rank]

    def words(self) -> str:
        """The state of the job, in a few words."""
        return f"{self.codes.count(None)} of {self.size} ranks run"

    @property
    def verdict(self) -> blame.Verdict | None:
        """Which rank is the root cause; None when no rank has failed."""
        return blame.judge(self.endings)

    @property
    def over(self) -> bool:
        """Whether the job has ended: no rank will answer any more."""
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> int:
        """Waits until all ranks have ended. Returns the exit code of the root cause, or 0. TimeoutError if late."""
        if not self._over.wait(timeout):
            raise TimeoutError(f"after {timeout} s these ranks still run: {self._running()}")
        return self.failure[1] if self.failure is not None else 0

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Sends a signal to one rank."""
        self._loop.call(lambda: self._line(rank).send(agent_messages.Signal(rank, number, 0)))

    def stop(self, grace: float = GRACE_SECONDS, number: int = signal.SIGTERM) -> None:
        """Sends `number` to all ranks, and kills those that still run after `grace` seconds. Does not wait."""

        def act() -> None:
            self._hurried = True
            self._stop(grace, number)

        self._loop.call(act)

    def abandon(self) -> None:
        """Kills all ranks immediately."""
        self._stopped = self._hurried = True
        for line in list(self._lines.values()):
            line.cut()

    def send_call(self, rank: int, pieces: Iterator[agent_messages.Call]) -> None:
        """Sends pieces of a call to one rank, as fast as the rank reads them. Safe from any thread."""

        def act() -> None:
            if self.codes[rank] is None:
                self._pumps.setdefault(rank, Pump(self._line(rank))).add(pieces)

        self._loop.call(act)

    def settle(self, seconds: float) -> None:
        """Returns when all output that was received is written, or after `seconds`."""
        written = threading.Event()
        self._writer.add(written.set)
        written.wait(seconds)

    def draw(self, act: Callable[[], None]) -> None:
        """Calls `act` soon on the thread that writes output, unless output waits there. Safe from any thread."""
        self._loop.call(lambda: None if self._unwritten else self._writer.add(act))

    def close(self) -> None:
        """Kills what still runs and leaves nothing behind. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self.abandon()
        if self._thread is not None:
            self._loop.call(lambda: None)
            self._thread.join()
        self._writer.close(0.0 if self.stuck else OUTPUT_SECONDS)
        lost = [line.name for line in self._lines.values() if not line.close()]
        if self._hub is not None:
            self._hub.close()
        self._loop.close()
        self._over.set()
        if lost:
            self._say(f"no answer from {', '.join(lost)}: processes of this job may be left there")

    def __enter__(self: J) -> J:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The start, on the caller's thread.

    def _start(self) -> None:
        plan = self._plan
        deadline = time.monotonic() + plan.start_timeout
        for host in dict.fromkeys(plan.hosts):
            line = self._lines[host] = AgentConnection(
                self._loop, host, plan.way, self._secret, self._heard, self._lost
            )
            self._waiting_for.add(host)
            line.open(deadline, lambda host=host: self._waiting_for.discard(host), self._trouble_with)  # type: ignore[misc]
        self._await(deadline)
        addresses = self._open_hub()
        for line in self._lines.values():
            reach = addresses[:1] if not line.host and len(self._lines) == 1 else addresses
            self._waiting_for.add(line)
            line.send(agent_messages.Prepare(tuple(reach), plan.interfaces))
        self._await(deadline)
        self._launch_all()
        self._waiting_for.update(range(self.size))
        self._await(deadline)
        self._thread = threading.Thread(target=self._run, name="farandole-job", daemon=True)
        self._thread.start()

    def _trouble_with(self, error: StartError) -> None:
        self._trouble = self._trouble or error

    def _await(self, deadline: float) -> None:
        while self._waiting_for and self._trouble is None:
            if time.monotonic() > deadline:
                raise StartError(f"the job did not start within {self._plan.start_timeout:g} s; raise --start-timeout")
            self._loop.turn(deadline)
        if self._trouble is not None:
            raise self._trouble

    def _open_hub(self) -> list[str]:
        addresses = []
        if any(host for host in self._plan.hosts):
            try:
                addresses = [f"tcp:{address}" for address in interfaces.candidates(self._plan.interfaces)]
            except ValueError as error:
                raise StartError(str(error)) from None
            if not addresses:
                raise StartError("this host has no network interface by which other hosts could reach it")
        else:
            addresses = [f"unix:{self.directory}/hub"]
        self._hub = Hub(self._secret, self.size, addresses, package_version())
        self._hub.start()
        return self._hub.addresses

    def _launch_all(self) -> None:
        plan = self._plan
        first = self._lines[plan.hosts[0]].prepared
        assert first is not None
        master = (self._address_of(plan.hosts[0]), first.port)
        said: set[str] = set()
        for line in self._lines.values():
            variables = environment.forwarded(plan.environ, bool(line.host))
            for part in parts(encode_variables(variables), "an environment variable"):
                line.send(agent_messages.Environment(part))
            for part in parts(map(os.fsencode, plan.command), "a word of the command"):
                line.send(agent_messages.Command(part))
        for place, host in zip(plan.places, plan.hosts, strict=True):
            line = self._lines[host]
            assert line.prepared is not None
            more = environment.of_place(place, master)
            more["FARANDOLE_RENDEZVOUS"] = line.prepared.address
            more.update(self._threads(line.prepared.cores, plan.hosts.count(host), said))
            if plan.interfaces:
                more["FARANDOLE_NETWORK_INTERFACES"] = ",".join(plan.interfaces)
            more.update(plan.of_host(host))
            if plan.extra:
                more.update(plan.extra[place.rank])
            directory = os.fsencode(plan.directory)
            line.send(agent_messages.Launch(place.rank, directory, encode_variables(more), int(plan.calls)))
        for text in sorted(said):
            self._say(text)

    def _address_of(self, host: str) -> str:
        """The address at which the other ranks can reach a server in rank 0."""
        if len(self._lines) == 1:
            return "127.0.0.1"
        if host:  # the address from which that host reached the launcher
            prepared = self._lines[host].prepared
            assert prepared is not None
            return prepared.addresses[0]
        # The address at which another host reached the launcher.
        other = next(line for name, line in self._lines.items() if name).prepared
        place = sockets.split(other.address if other is not None else "")
        return place if isinstance(place, str) else place[0]

    def _threads(self, cores: int, ranks: int, said: set[str]) -> dict[str, str]:
        if self._plan.threads is not None:
            return {"OMP_NUM_THREADS": str(self._plan.threads)}
        if "OMP_NUM_THREADS" in self._plan.environ:
            return {}
        threads = max(1, cores // ranks)
        said.add(
            f"OMP_NUM_THREADS is not set: {threads} for each of {ranks} ranks on {cores} cores "
            "(--threads-per-rank changes it)"
        )
        return {"OMP_NUM_THREADS": str(threads)}

    # The messages of the agents. All of this runs on the loop's thread.

    def _line(self, rank: int) -> AgentConnection:
        return self._lines[self._plan.hosts[rank]]

    def _running(self) -> list[int]:
        return [rank for rank, code in enumerate(self.codes) if code is None]

    def _heard(self, line: AgentConnection, report: Any) -> None:
        if isinstance(report, agent_messages.Output):
            self._print(report)
        elif isinstance(report, agent_messages.Ended):
            self._ended(report)
        elif isinstance(report, agent_messages.Call):
            self._on_call(report)
        elif isinstance(report, agent_messages.CallCredit):
            if report.rank in self._pumps:
                self._pumps[report.rank].taken()
        elif isinstance(report, agent_messages.Running):
            self.pids[report.rank] = report.pid
            self._waiting_for.discard(report.rank)
        elif isinstance(report, agent_messages.NotStarted):
            self._trouble_with(NotStarted(line.name if line.host else "", report))
        elif isinstance(report, agent_messages.AgentSignaled):
            self._was_asked(line, report.number)
        elif isinstance(report, agent_messages.Prepared):
            line.prepared = report
            self._waiting_for.discard(line)
            if not report.address:
                self._trouble_with(StartError(f"{line.name} cannot reach the launcher: {report.reason}"))

    def _print(self, report: agent_messages.Output) -> None:
        def write() -> None:
            error: Exception | None = None
            try:
                self._sink.feed(report.rank, report.stream, report.data)
            except Exception as caught:
                error = caught
            self._loop.call(lambda: self._printed(report, error))

        self._unwritten += 1
        self._writer.add(write)

    def _printed(self, report: agent_messages.Output, error: Exception | None) -> None:
        self._unwritten -= 1
        line = self._line(report.rank)
        count = self._acknowledge.get(line, 0) + len(report.data)
        if count >= ACKNOWLEDGE_BYTES:
            line.send(agent_messages.OutputCredit(count))
            count = 0
        self._acknowledge[line] = count
        if isinstance(error, BrokenPipeError):  # nobody reads our output any more: end like a program in a pipeline
            self._fail(-1, 128 + signal.SIGPIPE, "")
        elif error is not None:
            self._fail(-1, 1, f"cannot write the output of rank {report.rank}: {error}")

    def _ended(self, report: agent_messages.Ended) -> None:
        if self.codes[report.rank] is not None:
            return
        ending = Ending.read(report.rank, report.code, self._stopped, report.cause, report.report)
        self.codes[report.rank] = report.code
        self.endings.append(ending)
        self._pumps.pop(report.rank, None)
        if self._hub is not None:
            self._hub.absent(report.rank, f"has ended ({blame.describe(report.code, report.cause)})")
        if not ending.failed:
            self._on_ended(report.rank, report.code)
            return
        if blame.root_cause_running(self.endings, self._running()):
            if not self._waiting_for_confession:
                self._waiting_for_confession = True
                self._loop.at("root cause", time.monotonic() + ROOT_CAUSE_WAIT_SECONDS, self._judge)
        else:
            self._judge()

    def _judge(self) -> None:
        self._loop.at("root cause", None, lambda: None)
        verdict = self.verdict
        assert verdict is not None
        self._fail(verdict.rank, verdict.code, "")

    def _lost(self, line: AgentConnection, reason: str) -> None:
        """The connection to an agent has ended. Its guard has killed everything that ran on that host."""
        ranks = [rank for rank in self._running() if self._plan.hosts[rank] == line.host]
        for rank in ranks:
            self.codes[rank] = 128 + signal.SIGKILL
            if self._hub is not None:
                self._hub.absent(rank, f"was lost with the agent on {line.name}")
        if self._thread is None:
            self._trouble_with(StartError(f"the agent on {line.name} was lost while the job started: {reason}"))
        elif ranks and not self._stopped:
            self._decided = True
            text = f"the agent on {line.name} was lost, and its ranks {_list(ranks)} with it: {reason}"
            self._fail(-1, 1, text + line.last_words(), told=True)

    def _was_asked(self, line: AgentConnection, number: int) -> None:
        if not self._stopped:
            self.asked = number
            self._fail(-1, 128 + number, f"the agent on {line.name} got {signal.Signals(number).name}")

    def _fail(self, rank: int, code: int, reason: str, told: bool = False) -> None:
        """`told`: the other ranks notice the failure themselves, though no rank is the root cause."""
        if self._stopped:
            return
        if self.failure is None or (self.failure[0] != rank and (rank < 0 or not self._decided)):
            self.failure = (rank, code)
            self.reason = reason
        if rank < 0 and not (told and self._plan.stop_on_failure):
            self._stop(GRACE_SECONDS, signal.SIGTERM)
        elif self._plan.stop_on_failure:
            self._let_survivors_end()

    def _let_survivors_end(self) -> None:
        """The other ranks notice the failure themselves. A signal now would interrupt their reports about it."""
        if not self._survivors_may_end:
            self._survivors_may_end = True
            end = time.monotonic() + self._plan.survivor_grace
            self._loop.at("survivors", end, lambda: self._stop(GRACE_SECONDS, signal.SIGTERM))

    def _stop(self, grace: float, number: int) -> None:
        self._stopped = True
        for timer in ("root cause", "survivors"):
            self._loop.at(timer, None, lambda: None)
        self._signal_all(number if grace > 0 else signal.SIGKILL)
        if grace > 0:
            self._loop.at("kill", time.monotonic() + grace, lambda: self._signal_all(signal.SIGKILL))

    def _signal_all(self, number: int) -> None:
        for line in self._lines.values():
            line.send(agent_messages.Signal(agent_messages.ALL, number, 1))

    def _run(self) -> None:
        try:
            while self._still_going() and not self._closed:
                self._loop.turn()
            self._finish_output()
        except Exception:
            self._stopped = True
            self.failure = (-1, 1)
            self.reason = f"the launcher itself has failed; please report this:\n{traceback.format_exc().rstrip()}"
        finally:
            if not self._stopped and not self._decided and (verdict := self.verdict) is not None:
                self.failure = (verdict.rank, verdict.code)
            self._over.set()
            self._on_over()

    def _still_going(self) -> bool:
        return None in self.codes

    def _finish_output(self) -> None:
        """Waits until all output is written; only for a short time if the job must end soon."""
        deadline: float | None = None
        while self._unwritten and not self._closed:
            if self._hurried and deadline is None:
                deadline = time.monotonic() + OUTPUT_SECONDS
            if deadline is not None and time.monotonic() >= deadline:
                self.stuck = True
                return
            self._loop.turn(deadline)


class NotStarted(StartError):
    """The command of a rank cannot be run on its host."""

    def __init__(self, host: str, report: agent_messages.NotStarted) -> None:
        where = f" on {host}" if host else ""
        super().__init__(f"cannot run the command{where}: {report.text}", 127)
        self.number = report.number


def encode_variables(variables: Mapping[str, str]) -> tuple[bytes, ...]:
    """Variables as messages to agents carry them: NAME=VALUE in bytes."""
    return tuple(os.fsencode(f"{name}={value}") for name, value in variables.items())


def parts(entries: Iterable[bytes], what: str) -> list[tuple[bytes, ...]]:
    """The entries in parts. Each part is small enough for one message."""
    parts: list[list[bytes]] = [[]]
    size = 0
    for entry in entries:
        if len(entry) > LONGEST_ENTRY:
            raise StartError(f"{what} of {len(entry)} bytes is too long: {os.fsdecode(entry[:40])}...", 127)
        if size + len(entry) > PART_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(entry)
        size += len(entry)
    return [tuple(part) for part in parts]


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:16])) + (" ..." if len(ranks) > 16 else "")
