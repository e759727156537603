# The ranks of a job of fixed size: starts an agent on each host, the hub, and the ranks, and notes how they end.
# Touches connections to agents and the hub; outcome.py decides what a failure means.
"""`FixedRanks` is what a `Job` knows about its ranks when their number does not change."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from typing import Any

from farandole.base.version import package_version
from farandole.launch import blame, environment
from farandole.launch.agent_connection import AgentConnection, StartError
from farandole.launch.blame import Ending
from farandole.launch.plan import NotStarted
from farandole.launch.ranks import JobRanks, Parts
from farandole.rendezvous import agent_messages, interfaces, sockets
from farandole.rendezvous.hub import Hub


class FixedRanks(JobRanks):
    """See the module."""

    def __init__(self, *parts: *Parts) -> None:
        super().__init__(*parts)
        self.codes: list[int | None] = [None] * len(self._plan.numbers)
        self.pids: list[int] = [0] * len(self._plan.numbers)
        self._hub: Hub | None = None
        self._start_error: StartError | None = None
        self._waiting_for: set[object] = set()  # what must still happen before the job has started
        self._started = False

    # What a job asks.

    @property
    def refused(self) -> int:
        """How many unauthenticated connections the hub has refused."""
        return self._hub.refused if self._hub is not None else 0

    @property
    def joined(self) -> bool:
        """Whether a rank has called init()."""
        return self._hub is not None and self._hub.admitted > 0

    def rank_of(self, rank: int) -> int:
        """The rank itself."""
        return rank

    def host_of(self, rank: int) -> str:
        """The name of a rank's host."""
        return self._plan.numbers[rank].hostname

    def pid_of(self, rank: int) -> int:
        """The process id of a rank."""
        return self.pids[rank]

    def status_text(self) -> str:
        """The state of the job, in a few words."""
        return f"{self.codes.count(None)} of {len(self.codes)} ranks run"

    def running(self) -> list[int]:
        """The ranks that run."""
        return [rank for rank, code in enumerate(self.codes) if code is None]

    def runs(self, rank: int) -> bool:
        """Whether a rank runs."""
        return self.codes[rank] is None

    def going_on(self) -> bool:
        """Whether the job has not ended."""
        return None in self.codes

    def connection(self, rank: int) -> AgentConnection | None:
        """The connection to the agent of a rank."""
        return self._agents.connections[self._plan.hosts[rank]]

    def stop(self) -> None:
        """Nothing: nothing is decided here."""

    def close(self) -> None:
        """Ends the hub. Called when the connections to the agents have ended."""
        if self._hub is not None:
            self._hub.close()

    # The start, on the caller's thread.

    def start(self) -> None:
        """Returns when all ranks have started. StartError when one cannot."""
        plan, connections = self._plan, self._agents.connections
        deadline = time.monotonic() + plan.start_timeout
        for host in dict.fromkeys(plan.hosts):
            connection = self._agents.connect(host, host)
            self._waiting_for.add(host)
            connection.open(deadline, lambda host=host: self._waiting_for.discard(host), self._fail_start)  # type: ignore[misc]
        self._await(deadline)
        self._hub = Hub(self._agents.secret, len(self.codes), self._hub_addresses(), package_version())
        self._hub.on_warning = self.on_warning
        self._hub.start()
        addresses = self._hub.addresses
        for connection in connections.values():
            reach = addresses[:1] if not connection.host and len(connections) == 1 else addresses
            self._waiting_for.add(connection)
            connection.send(agent_messages.Prepare(tuple(reach), plan.interfaces))
        self._await(deadline)
        self._launch_all()
        self._waiting_for.update(range(len(self.codes)))
        self._await(deadline)
        self._started = True

    def _fail_start(self, error: StartError) -> None:
        self._start_error = self._start_error or error

    def _await(self, deadline: float) -> None:
        while self._waiting_for and self._start_error is None:
            if time.monotonic() > deadline:
                raise StartError(
                    f"the job did not start within {self._plan.start_timeout:g} s; raise --start-timeout",
                    topic="late-start",
                )
            self._agents.loop.turn(deadline)
        if self._start_error is not None:
            raise self._start_error

    def _hub_addresses(self) -> list[str]:
        if not any(self._plan.hosts):
            return [f"unix:{self._agents.connections[''].directory}/hub"]
        try:
            addresses = [f"tcp:{address}" for address in interfaces.candidates(self._plan.interfaces)]
        except ValueError as error:
            raise StartError(str(error), topic="no-network") from None
        if not addresses:
            raise StartError(
                "this host has no network interface by which other hosts could reach it", topic="no-network"
            )
        return addresses

    def _launch_all(self) -> None:
        plan, connections = self._plan, self._agents.connections
        first = connections[plan.hosts[0]].prepared
        assert first is not None
        master = (self._address_of(plan.hosts[0]), first.port)
        notes: set[str] = set()
        for connection in connections.values():
            for message in plan.command_messages(bool(connection.host)):
                connection.send(message)
        for index, host in zip(plan.numbers, plan.hosts, strict=True):
            connection = connections[host]
            assert connection.prepared is not None
            threads, note = plan.thread_variables(connection.prepared.cores, plan.hosts.count(host))
            variables = {**environment.of_rank(index, master), **threads}
            connection.send(plan.launch_message(index.rank, host, connection.prepared, variables))
            notes.add(note)
        for text in sorted(filter(None, notes)):
            self._say(text)

    def _address_of(self, host: str) -> str:
        """The address at which the other ranks can reach a server in rank 0."""
        connections = self._agents.connections
        if len(connections) == 1:
            return "127.0.0.1"
        if host:  # the address from which that host reached the launcher
            prepared = connections[host].prepared
            assert prepared is not None
            return prepared.addresses[0]
        # The address at which another host reached the launcher.
        other = next(connection for name, connection in connections.items() if name).prepared
        sockaddr = sockets.split(other.address if other is not None else "")
        return sockaddr if isinstance(sockaddr, str) else sockaddr[0]

    # The messages of the agents. All of this runs on the loop's thread.

    def on_report(self, connection: AgentConnection, report: Any) -> None:
        """Handles a report of an agent."""
        if isinstance(report, agent_messages.Ended):
            self._ended(report)
        elif isinstance(report, agent_messages.Running):
            self.pids[report.rank] = report.pid
            self._waiting_for.discard(report.rank)
        elif isinstance(report, agent_messages.NotStarted):
            self._fail_start(NotStarted(connection.name if connection.host else "", report))
        elif isinstance(report, agent_messages.AgentSignaled):
            name = signal.Signals(report.number).name
            self._outcome.fail(128 + report.number, f"the agent on {connection.name} got {name}", topic="agent-stopped")
        elif isinstance(report, agent_messages.Prepared):
            connection.prepared = report
            self._waiting_for.discard(connection)
            if not report.address:
                self._fail_start(
                    StartError(f"{connection.name} cannot reach the launcher: {report.reason}", topic="no-network")
                )

    def _ended(self, report: agent_messages.Ended) -> None:
        if self.codes[report.rank] is not None:
            return
        ending = Ending.read(report.rank, report.code, self._outcome.stopped, report.cause, report.report)
        self.codes[report.rank] = report.code
        if self._hub is not None:
            self._hub.absent(report.rank, f"has ended ({blame.describe(report.code, report.cause)})")
        self._outcome.rank_ended(ending, self.running())
        if not ending.failed:
            self._on_ended(report.rank, report.code)

    def lost(self, connection: AgentConnection, reason: str) -> None:
        """The connection to an agent has ended. Its guard has killed everything that ran on that host."""
        ranks = [rank for rank in self.running() if self._plan.hosts[rank] == connection.host]
        for rank in ranks:
            self.codes[rank] = 128 + signal.SIGKILL
            if self._hub is not None:
                self._hub.absent(rank, f"was lost with the agent on {connection.name}")
        if not self._started:
            self._fail_start(
                StartError(
                    f"the agent on {connection.name} was lost while the job started: {reason}", topic="agent-lost"
                )
            )
        elif ranks:
            text = f"the agent on {connection.name} was lost, and its ranks {_list(ranks)} with it: {reason}"
            self._outcome.agent_lost(text + connection.last_words())


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:16])) + (" ..." if len(ranks) > 16 else "")
