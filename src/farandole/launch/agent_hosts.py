# The hosts of an elastic job: connects to their agents, reconnects to lost ones, and exchanges heartbeats with them.
# Touches connections to agents and timers; tells the elastic driver which hosts are up, silent or lost.
"""`AgentHosts` manages the hosts; elastic.py manages the workers on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from farandole.launch.agent_connection import AgentConnection, StartError
from farandole.launch.agents import Agents
from farandole.launch.hosts import Host
from farandole.launch.outcome import Outcome
from farandole.launch.plan import ElasticOptions, Plan
from farandole.rendezvous import agent_messages
from farandole.rendezvous.elastic.hub import ElasticHub
from farandole.rendezvous.elastic.members import Start

RETRY_SECONDS = 1.0  # before a lost agent is started again; twice as long after each failure
LONGEST_RETRY = 60.0
GOOD_SECONDS = 10.0  # when an agent has worked for so long, its earlier failures do not count any more


@dataclass(eq=False)
class AgentHost:
    """A host of the job: the connection to its agent, and the workers that wait for this connection."""

    name: str
    here: bool  # this is the launcher's own host
    connection: AgentConnection | None = None
    ready: bool = False
    waiting: list[Start] = field(default_factory=list)
    failures: int = 0
    number: int = 0  # the number of its agent
    last_message_at: float = 0.0  # when the last message of its agent came
    since: float = 0.0  # when its agent became ready
    silent: bool = False  # its agent was silent for so long that its workers are evicted
    suspected: bool = False


class WorkersOnHosts(Protocol):
    """What this file asks about workers and tells about hosts."""

    def on_host(self, name: str) -> Sequence[int]:
        """The workers that run on a host."""
        ...

    def host_ready(self, host: AgentHost) -> None:
        """The agent of this host can start workers."""
        ...

    def host_lost(self, name: str) -> None:
        """The agent of this host is lost, and its workers with it."""
        ...


class AgentHosts:
    """All methods run in the loop."""

    def __init__(
        self,
        plan: Plan,
        options: ElasticOptions,
        agents: Agents,
        elastic: ElasticHub,
        workers: WorkersOnHosts,
        outcome: Outcome,
        say: Callable[[str], None],
    ) -> None:
        self.first_error: StartError | None = None  # of the connections to agents
        self.hosts: dict[str, AgentHost] = {}
        self._plan = plan
        self._options = options
        self._agents = agents
        self._elastic = elastic
        self._driver = elastic.driver
        self._workers = workers
        self._outcome = outcome
        self._say = say
        self._ticked = 0.0
        self._numbers = 0
        self._started = False

    def start(self, found: Sequence[Host], here: Mapping[str, bool]) -> None:
        """Connects to these hosts. Returns when one of them is ready. StartError when none answers."""
        deadline = time.monotonic() + self._plan.start_timeout
        self._tick()
        self.found(found, here)
        while self.hosts and not any(one.ready for one in self.hosts.values()):
            if self.first_error is not None and not any(one.connection for one in self.hosts.values()):
                raise self.first_error
            if time.monotonic() > deadline:
                raise StartError(
                    f"no host answered within {self._plan.start_timeout:g} s; raise --start-timeout", topic="no-answer"
                )
            self._agents.loop.turn(deadline)
        self._started = True

    def found(self, found: Sequence[Host], here: Mapping[str, bool]) -> None:
        """Discovery names these hosts. `here`: whether each is the launcher's own host."""
        for host in found:
            if host.name not in self.hosts:
                self._numbers += 1
                self.hosts[host.name] = AgentHost(host.name, here[host.name], number=self._numbers)
                self._connect(self.hosts[host.name])

        def in_use(name: str) -> bool:
            return name not in self.hosts or bool(self._workers.on_host(name))

        slots = [(one.name, one.slots) for one in found]
        for name in self._elastic.hosts_found(slots, in_use, "discovery"):
            forgotten = self.hosts.pop(name)
            self._agents.loop.at(forgotten, None, lambda: None)
            self._drop(forgotten)

    def of(self, connection: AgentConnection) -> AgentHost | None:
        """The host of a connection; None when it has another connection now."""
        host = self.hosts.get(connection.name)
        return host if host is not None and host.connection is connection else None

    def heard_from(self, host: AgentHost) -> None:
        """Any message of its agent has come."""
        host.last_message_at = time.monotonic()
        host.suspected = False
        if host.silent:
            host.silent = False
            self._say(f"{host.name} is back")
            self._elastic.deliver(self._driver.host_up(host.name, host.last_message_at))

    def agent_reached_hub(self, number: int) -> None:
        """The agent with this number has connected to the hub."""
        for host in self.hosts.values():
            if host.number == number and host.ready:
                self.heard_from(host)
                return

    def prepared(self, host: AgentHost, connection: AgentConnection, report: agent_messages.Prepared) -> None:
        """The agent says whether it reaches the hub. Then it gets all that it needs to start workers."""
        if not report.address:
            self._unreachable(
                host, StartError(f"{host.name} cannot reach the launcher: {report.reason}", topic="no-network")
            )
            return
        connection.prepared = report
        host.ready = True
        host.last_message_at = host.since = time.monotonic()
        times = self._options.times
        seconds = (times.heartbeat, times.suspect, times.evict, times.give_up, self._options.limits.drain_timeout)
        connection.send(agent_messages.WatchRanks(host.number, *(int(1000 * one) for one in seconds)))
        for message in self._plan.command_messages(bool(connection.host)):
            connection.send(message)
        self._elastic.deliver(self._driver.host_up(host.name, time.monotonic()))
        self._workers.host_ready(host)

    def lost(self, connection: AgentConnection, reason: str) -> None:
        """The connection to an agent has ended."""
        host = self.of(connection)
        if host is not None:
            error = StartError(f"its agent was lost: {reason}{connection.last_words()}", topic="agent-lost")
            self.first_error = self.first_error or error
            self._lose(host, str(error))

    def _tick(self) -> None:
        """Sends heartbeats. If the launcher itself did not run for a time, it starts to count the silence again."""
        now, times = time.monotonic(), self._options.times
        late = now - self._ticked > 2 * times.heartbeat
        self._ticked = now
        for host in list(self.hosts.values()):
            if host.connection is None or not host.ready:
                continue
            if late:
                host.last_message_at = now
            silence = now - host.last_message_at
            host.connection.send(agent_messages.Heartbeat(int(1000 * silence)))
            if silence >= times.suspect and not host.suspected:
                host.suspected = True
                self._say(f"no word from {host.name} for {silence:.1f} s")
            if silence >= times.evict and not host.silent:
                host.silent = True
                self._elastic.deliver(self._driver.host_silent(host.name, now))
            if silence >= times.give_up:
                self._lose(host, f"no word from it for {silence:.0f} s")
        self._agents.reap()
        self._agents.loop.at("tick", now + times.heartbeat, self._tick)

    def _connect(self, host: AgentHost) -> None:
        try:
            connection = host.connection = self._agents.connect("" if host.here else host.name, host.name)
        except StartError as error:
            self._unreachable(host, error)
            return
        connection.name = host.name

        def opened() -> None:
            connection.send(agent_messages.Prepare(tuple(self._elastic.addresses), self._plan.interfaces))

        deadline = time.monotonic() + self._plan.start_timeout
        connection.open(deadline, opened, lambda error: self._unreachable(host, error))

    def _unreachable(self, host: AgentHost, error: StartError) -> None:
        """A host cannot be used now. We try it again as long as discovery lists it."""
        if self.hosts.get(host.name) is not host:
            return  # discovery does not list it any more
        self.first_error = self.first_error or error
        self._lose(host, str(error))

    def _lose(self, host: AgentHost, text: str) -> None:
        if host.ready and time.monotonic() > host.since + GOOD_SECONDS:
            host.failures = 0
        host.ready = False
        self._drop(host)
        host.waiting.clear()
        self._workers.host_lost(host.name)
        if self._outcome.stopped or self._driver.over is not None:
            return
        host.failures += 1
        seconds = min(LONGEST_RETRY, RETRY_SECONDS * 2.0 ** (host.failures - 1))
        if self._started:
            self._say(f"{host.name} is out, and is tried again in {seconds:g} s: {text}")
        if host.name in self._driver.state.hosts:
            self._elastic.deliver(self._driver.host_lost(host.name, text, time.monotonic()))
        self._agents.loop.at(host, time.monotonic() + seconds, lambda: self._try_again(host))

    def _drop(self, host: AgentHost) -> None:
        if host.connection is not None:
            self._agents.drop(host.name)
            host.connection = None

    def _try_again(self, host: AgentHost) -> None:
        known = self._driver.state.hosts.get(host.name)
        if known is not None and known.listed and not self._outcome.stopped:
            self._connect(host)
        elif self.hosts.get(host.name) is host:
            del self.hosts[host.name]
