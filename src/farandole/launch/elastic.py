# An elastic job: it starts and ends agents and workers as the elastic driver decides and host discovery finds.
# Touches connections to agents, the hub, two threads; decides through rendezvous/elastic/driver.py.
"""`ElasticJob(plan, terms, sink)` is a `Job` whose ranks change. It uses worker numbers where other jobs use ranks."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from farandole.base.version import package_version
from farandole.launch import blame, environment, ssh
from farandole.launch.agent_connection import AgentConnection, Pump, StartError
from farandole.launch.blame import Ending
from farandole.launch.discovery import Discovery, DiscoveryError
from farandole.launch.hosts import Host
from farandole.launch.job import GRACE_SECONDS, Job, Plan, encode_variables, parts
from farandole.launch.output import Sink
from farandole.launch.slots import Place
from farandole.rendezvous import agent_messages, interfaces
from farandole.rendezvous.elastic.driver import ElasticDriver
from farandole.rendezvous.elastic.members import Drop, Kill, Over, Say, Start
from farandole.rendezvous.elastic.policy import Limits, Times
from farandole.rendezvous.hub import Hub

LOOK_SECONDS = 1.0  # between two searches for hosts
RETRY_SECONDS = 1.0  # before a lost agent is started again; twice as long after each failure
LONGEST_RETRY = 60.0
GOOD_SECONDS = 10.0  # when an agent has worked for so long, its earlier failures do not count any more
KEPT_ENDINGS = 64  # endings from which the root cause is found when the job fails


@dataclass(frozen=True)
class ElasticOptions:
    """What makes a job elastic."""

    limits: Limits
    discovery: Discovery
    times: Times = field(default_factory=Times)


@dataclass(eq=False)
class AgentHost:
    """A host of the job: the connection to its agent, and the workers that wait for this connection."""

    name: str
    here: bool  # this is the launcher's own host
    line: AgentConnection | None = None
    ready: bool = False
    waiting: list[Start] = field(default_factory=list)
    failures: int = 0
    number: int = 0  # the number of its agent
    heard: float = 0.0  # when the last message of its agent came
    since: float = 0.0  # when its agent became ready
    silent: bool = False  # its agent was silent for so long that its workers are evicted
    suspected: bool = False


class ElasticJob(Job):
    """A running elastic job; `wait()` returns 0 when the ranks ended without an error."""

    def __init__(
        self,
        plan: Plan,
        terms: ElasticOptions,
        sink: Sink,
        say: Callable[[str], None] = lambda line: None,
        on_call: Callable[[agent_messages.Call], None] = lambda piece: None,
        on_ended: Callable[[int, int], None] = lambda rank, code: None,
        on_over: Callable[[], None] = lambda: None,
        on_running: Callable[[int], None] = lambda worker: None,
    ) -> None:
        self._on_running = on_running
        self._terms = terms
        self.driver = ElasticDriver(terms.limits, package_version(), terms.times)
        self._stations: dict[str, AgentHost] = {}
        self._old: list[AgentConnection] = []  # connections to hosts that are not in the job any more
        self._where: dict[int, tuple[str, int]] = {}  # worker -> its host and process id
        self._was: dict[int, int] = {}  # worker -> its rank when it ended
        self._running_workers: set[int] = set()
        self._looking: threading.Thread | None = None
        self._stop_looking = threading.Event()
        self._trouble_said = ""
        self._ticked = 0.0
        self._numbers = 0
        self._runs = 0  # the value of `driver.runs` when the oldest of `endings` happened
        super().__init__(plan, sink, say, on_call, on_ended, on_over)

    # Methods for users.

    def rank_of(self, worker: int) -> int:
        """The present rank of a worker, or its last rank if it has ended."""
        known = self.driver.workers.get(worker)
        return known.rank if known is not None and known.rank >= 0 else self._was.get(worker, worker)

    def host_of(self, rank: int) -> str:
        """The name of a worker's host."""
        return self._where.get(rank, ("?", 0))[0]

    def pid_of(self, rank: int) -> int:
        """The process id of a worker."""
        return self._where.get(rank, ("?", 0))[1]

    @property
    def verdict(self) -> blame.Verdict | None:
        """The root cause in the last generation or after it. Workers that failed earlier have been replaced."""
        return super().verdict if self._runs == self.driver.runs else None

    def words(self) -> str:
        """The state of the job, in a few words."""
        members = len(self.driver.members)
        return f"{members} ranks run, generation {self.driver.last}"

    def send_call(self, rank: int, pieces: Iterator[agent_messages.Call]) -> None:
        """Sends pieces of a call to one worker, as fast as the worker reads them. Safe from any thread."""

        def act() -> None:
            if rank in self._running_workers:
                self._pumps.setdefault(rank, Pump(self._line(rank))).add(pieces)

        self._loop.call(act)

    def close(self) -> None:
        """Kills what still runs and leaves nothing behind. A second call does nothing."""
        self._stop_looking.set()
        self._terms.discovery.close()
        if self._looking is not None:
            self._looking.join()
        for line in self._old:
            line.cut()
        super().close()
        for line in self._old:
            line.close()
        self._old.clear()

    # The start.

    def _start(self) -> None:
        try:
            found = self._terms.discovery.find()
        except DiscoveryError as error:
            raise StartError(str(error)) from None
        here = {host.name: self._is_here(host.name) for host in found}
        self._open_hub_at(all(here.values()) and self._terms.discovery.fixed)
        deadline = time.monotonic() + self._plan.start_timeout
        self._found(found, here)
        while self._stations and not any(one.ready for one in self._stations.values()):
            if self._trouble is not None and not any(one.line for one in self._stations.values()):
                raise self._trouble
            if time.monotonic() > deadline:
                raise StartError(f"no host answered within {self._plan.start_timeout:g} s; raise --start-timeout")
            self._loop.turn(deadline)
        self._thread = threading.Thread(target=self._run, name="farandole-job", daemon=True)
        self._thread.start()
        if not self._terms.discovery.fixed:
            self._looking = threading.Thread(target=self._look, name="farandole-discovery", daemon=True)
            self._looking.start()

    def _is_here(self, name: str) -> bool:
        """Whether the agent of that host is a child of this process. Agents that connect to us themselves are not."""
        return isinstance(self._plan.way, ssh.SshOptions) and interfaces.is_this_host(name)

    def _open_hub_at(self, alone: bool) -> None:
        try:
            addresses = [] if alone else [f"tcp:{one}" for one in interfaces.candidates(self._plan.interfaces)]
        except ValueError as error:
            raise StartError(str(error)) from None
        size = self._terms.limits.np
        self._hub = Hub(
            self._secret,
            size,
            addresses or ["tcp:127.0.0.1"],
            package_version(),
            rounds=self.driver,
            loop=self._loop,
            after=self._act,
        )
        self._hub.on_agent = self._probed
        self._hub.start()
        self._tick()

    # Heartbeats of agents. If the launcher itself did not run for a time, it starts to count the silence again.

    def _tick(self) -> None:
        now, times = time.monotonic(), self._terms.times
        late = now - self._ticked > 2 * times.beat
        self._ticked = now
        for station in list(self._stations.values()):
            if station.line is None or not station.ready:
                continue
            if late:
                station.heard = now
            silence = now - station.heard
            station.line.send(agent_messages.Heartbeat(int(1000 * silence)))
            if silence >= times.suspect and not station.suspected:
                station.suspected = True
                self._say(f"no word from {station.name} for {silence:.1f} s")
            if silence >= times.evict and not station.silent:
                station.silent = True
                self._deliver(self.driver.host_silent(station.name, now))
            if silence >= times.stubborn:
                self._part_with(station, f"no word from it for {silence:.0f} s")
        for line in [line for line in self._old if line.over]:  # `close` would block the loop while the process runs
            self._old.remove(line)
            line.close()
        self._loop.at("tick", now + times.beat, self._tick)

    def _heard_from(self, station: AgentHost) -> None:
        station.heard = time.monotonic()
        station.suspected = False
        if station.silent:
            station.silent = False
            self._say(f"{station.name} is back")
            self._deliver(self.driver.host_up(station.name, station.heard))

    def _probed(self, number: int) -> None:
        for station in self._stations.values():
            if station.number == number and station.ready:
                self._heard_from(station)
                return

    def _look(self) -> None:
        """Searches for hosts. It has its own thread, because a script or the lookup of a name may be slow."""
        here: dict[str, bool] = {}
        while not self._stop_looking.wait(LOOK_SECONDS):
            try:
                found = self._terms.discovery.find()
            except DiscoveryError as error:
                text = str(error)
                self._loop.call(lambda text=text: self._say_once(text))  # type: ignore[misc]
                continue
            names = [one.name for one in found]
            here = {name: here[name] if name in here else self._is_here(name) for name in names}
            self._loop.call(lambda found=found, here=here: self._found(found, here))  # type: ignore[misc]

    def _say_once(self, text: str) -> None:
        if text != self._trouble_said and not self._stopped:
            self._trouble_said = text
            if text:
                self._say(f"{text}; the hosts stay as they are")

    def _found(self, found: list[Host], here: dict[str, bool]) -> None:
        self._say_once("")
        if self._stopped:
            return
        for host in found:
            if host.name not in self._stations:
                self._numbers += 1
                self._stations[host.name] = AgentHost(host.name, here[host.name], number=self._numbers)
                self._connect(self._stations[host.name])
        self._deliver(self.driver.hosts_found([(one.name, one.slots) for one in found], time.monotonic()))
        for name in [name for name, host in self.driver.hosts.items() if not host.listed]:
            if name in self._stations and not self._workers_of(name):
                self._dismiss(self._stations.pop(name))

    def _workers_of(self, name: str) -> list[int]:
        return [worker for worker in self._running_workers if self._where[worker][0] == name]

    def _dismiss(self, station: AgentHost) -> None:
        """Removes a host that has no workers and that discovery does not list any more."""
        self._loop.at(station, None, lambda: None)
        # Workers may be waiting to be started there.
        self._deliver(self.driver.host_lost(station.name, "discovery does not name it any more", time.monotonic()))
        del self.driver.hosts[station.name]
        self._give_up_line(station)

    def _give_up_line(self, station: AgentHost) -> None:
        """Ends the connection to an agent. The process is reaped later, so that the launcher does not wait for it."""
        if station.line is not None:
            station.line.cut()
            self._lines.pop(station.name, None)
            self._old.append(station.line)
            station.line = None

    def _connect(self, station: AgentHost) -> None:
        host = "" if station.here else station.name
        try:
            line = station.line = AgentConnection(
                self._loop, host, self._plan.way, self._secret, self._heard, self._lost
            )
        except StartError as error:
            self._unreachable(station, error)
            return
        line.name = station.name
        self._lines[station.name] = line

        def opened() -> None:
            assert self._hub is not None
            line.send(agent_messages.Prepare(tuple(self._hub.addresses), self._plan.interfaces))

        deadline = time.monotonic() + self._plan.start_timeout
        line.open(deadline, opened, lambda error: self._unreachable(station, error))

    def _unreachable(self, station: AgentHost, error: StartError) -> None:
        """A host cannot be used now. We try it again as long as discovery lists it."""
        if self._stations.get(station.name) is not station:
            return  # discovery does not list it any more
        self._trouble_with(error)
        self._part_with(station, str(error))

    def _part_with(self, station: AgentHost, text: str) -> None:
        if station.ready and time.monotonic() > station.since + GOOD_SECONDS:
            station.failures = 0
        station.ready = False
        self._give_up_line(station)
        station.waiting.clear()
        for worker in self._workers_of(station.name):
            self._running_workers.discard(worker)
        if self._stopped or self.driver.over is not None:
            return
        station.failures += 1
        seconds = min(LONGEST_RETRY, RETRY_SECONDS * 2.0 ** (station.failures - 1))
        if self._thread is not None:
            self._say(f"{station.name} is out, and is tried again in {seconds:g} s: {text}")
        if station.name in self.driver.hosts:
            self._deliver(self.driver.host_lost(station.name, text, time.monotonic()))
        self._loop.at(station, time.monotonic() + seconds, lambda: self._try_again(station))

    def _try_again(self, station: AgentHost) -> None:
        host = self.driver.hosts.get(station.name)
        if host is not None and host.listed and not self._stopped:
            self._connect(station)
        elif self._stations.get(station.name) is station:
            del self._stations[station.name]

    # The messages of the agents. All of this runs on the loop's thread.

    def _line(self, rank: int) -> AgentConnection:
        station = self._stations.get(self.host_of(rank))
        return station.line if station is not None and station.line is not None else _NoConnection()  # type: ignore[return-value]

    def _running(self) -> list[int]:
        return sorted(self._running_workers)

    def _heard(self, line: AgentConnection, report: Any) -> None:
        station = self._stations.get(line.name)
        if station is not None and station.line is line:
            self._heard_from(station)
        if isinstance(report, agent_messages.Prepared):
            self._prepared(line, report)
        elif isinstance(report, agent_messages.Heartbeat):
            pass
        elif isinstance(report, agent_messages.RankSilent):
            self._deliver(self.driver.quiet(report.rank, report.silent_ms / 1000, report.state, time.monotonic()))
        elif isinstance(report, agent_messages.Running):
            self._where[report.rank] = (line.name, report.pid)
            self._on_running(report.rank)
        elif isinstance(report, agent_messages.NotStarted):
            self._not_started(line, report)
        else:
            super()._heard(line, report)

    def _prepared(self, line: AgentConnection, report: agent_messages.Prepared) -> None:
        station = self._stations.get(line.name)
        if station is None or station.line is not line:
            return
        if not report.address:
            self._unreachable(station, StartError(f"{line.name} cannot reach the launcher: {report.reason}"))
            return
        line.prepared = report
        station.ready = True
        station.heard = station.since = time.monotonic()
        times = self._terms.times
        seconds = (
            times.beat,
            times.suspect,
            times.evict,
            times.stubborn,
            self._terms.limits.drain_timeout,
        )
        line.send(agent_messages.WatchRanks(station.number, *(int(1000 * one) for one in seconds)))
        plan = self._plan
        variables = encode_variables(environment.forwarded(plan.environ, bool(line.host)))
        for part in parts(variables, "an environment variable"):
            line.send(agent_messages.Environment(part))
        for part in parts(map(os.fsencode, plan.command), "a word of the command"):
            line.send(agent_messages.Command(part))
        self._deliver(self.driver.host_up(station.name, time.monotonic()))
        waiting, station.waiting = station.waiting, []
        for start in waiting:
            self._launch(station, start)

    def _launch(self, station: AgentHost, start: Start) -> None:
        line = station.line
        if line is None or not station.ready:
            station.waiting.append(start)
            return
        assert line.prepared is not None
        if start.worker not in self.driver.workers:
            return  # the driver has given up this worker before it started
        slots = self.driver.hosts[start.host].slots
        said: set[str] = set()
        address = line.prepared.addresses[0] if line.prepared.addresses else "127.0.0.1"
        variables = {
            **environment.of_place(Place(*start.place, start.host), (address, line.prepared.port)),
            "FARANDOLE_RENDEZVOUS": line.prepared.address,
            "FARANDOLE_ELASTIC": "1",
            "HOROVOD_ELASTIC": "1",
            "FARANDOLE_WORKER": str(start.worker),
            **self._threads(line.prepared.cores, slots, said),
            **self._plan.of_host(start.host),
        }
        if self._plan.interfaces:
            variables["FARANDOLE_NETWORK_INTERFACES"] = ",".join(self._plan.interfaces)
        self._where[start.worker] = (start.host, 0)
        self._running_workers.add(start.worker)
        directory = os.fsencode(self._plan.directory)
        line.send(agent_messages.Launch(start.worker, directory, encode_variables(variables), int(self._plan.calls)))

    def _not_started(self, line: AgentConnection, report: agent_messages.NotStarted) -> None:
        where = f" on {line.name}" if line.host else ""
        self._running_workers.discard(report.rank)
        if not self.driver.runs and len(self._stations) == 1:
            self._fail(-1, 127, f"cannot run the command{where}: {report.text}")
            return
        self._say(f"cannot run the command{where}: {report.text}")
        self._deliver(self.driver.ended(report.rank, 127, report.text, time.monotonic()))

    def _ended(self, report: agent_messages.Ended) -> None:
        if report.rank not in self._running_workers:
            return
        self._running_workers.discard(report.rank)
        self._pumps.pop(report.rank, None)
        self._was[report.rank] = self.rank_of(report.rank)
        ending = self._read_ending(report)
        worker = self.driver.workers.get(report.rank)
        if worker is None or not worker.dismissed:
            kept = self.endings[-KEPT_ENDINGS:] if self._runs == self.driver.runs else []
            self.endings, self._runs = [*kept, ending], self.driver.runs
        text = f"has ended ({blame.describe(report.code, report.cause)})"
        if ending.failed and worker is not None and not worker.dismissed and worker.leaving is None:
            self._say(f"{self.driver.name(worker)} {text}")
        self._deliver(self.driver.ended(report.rank, report.code, text, time.monotonic()))
        if ending.code == 0:
            self._on_ended(report.rank, report.code)

    def _read_ending(self, report: agent_messages.Ended) -> Ending:
        """The ending of a worker. The report names the blamed process by its rank; we translate it to a worker."""
        ending = Ending.read(self.rank_of(report.rank), report.code, self._stopped, report.cause, report.report)
        blames = ending.blames if ending.blames is None else self.driver.roster.get(ending.blames, -1)
        return dataclasses.replace(ending, rank=report.rank, blames=blames)

    def _was_asked(self, line: AgentConnection, number: int) -> None:
        """An agent got a signal: a scheduler, for example, wants its host back. Its ranks save and leave."""
        if self._stopped or line.name not in self.driver.hosts:
            return
        seconds = self._terms.limits.drain_timeout
        self._say(f"the agent on {line.name} got {signal.Signals(number).name}: its ranks have {seconds:g} s to leave")
        self._deliver(self.driver.drain(line.name, seconds, time.monotonic()))

    def _lost(self, line: AgentConnection, reason: str) -> None:
        station = self._stations.get(line.name)
        if station is not None and station.line is line:
            error = StartError(f"its agent was lost: {reason}{line.last_words()}")
            self._trouble_with(error)
            self._part_with(station, str(error))

    # The decisions of the driver.

    def _deliver(self, sends: Any) -> None:
        if self._hub is not None:
            self._hub.deliver(sends)

    def _act(self) -> None:
        for act in self.driver.take_acts():
            if isinstance(act, Start):
                self._launch(self._stations[act.host], act)
            elif isinstance(act, Kill):
                self._line(act.worker).send(agent_messages.Signal(act.worker, signal.SIGKILL, 1))
            elif isinstance(act, Drop):
                assert self._hub is not None
                self._hub.drop(act.member)
            elif isinstance(act, Say):
                self._say(act.text)
            elif isinstance(act, Over):
                self._finish(act)

    def _finish(self, over: Over) -> None:
        if self._stopped:
            return
        if over.failed:
            verdict = self.verdict
            self.failure = (verdict.rank, verdict.code) if verdict is not None else (-1, 1)
            self.reason = over.text
        # The driver has waited until the ranks of the last generation reported and ended. The workers that are left
        # wait for ranks that will not come.
        self._stop(GRACE_SECONDS, signal.SIGTERM)

    def _stop(self, grace: float, number: int) -> None:
        self._stop_looking.set()
        self.driver.stop()
        super()._stop(grace, number)

    def _still_going(self) -> bool:
        if self._stopped:
            return bool(self._running_workers)
        return True


class _NoConnection:
    """Takes the place of the connection to a host that is lost; it sends nothing."""

    host = name = ""
    backlog = 0

    def send(self, order: Any) -> None:
        pass

    def when_drained(self, act: Callable[[], None]) -> None:
        pass
