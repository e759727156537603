# The workers of an elastic job: starts and kills them as the elastic driver decides, and tells it how they end.
# Touches the hub, and agents through agent_hosts.py; decides through rendezvous/elastic/driver.py.
"""`ElasticRanks` is what a `Job` knows about its ranks when they change. It uses worker numbers instead of ranks."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable
from typing import Any

from farandole.base.version import package_version
from farandole.launch import blame, environment, ssh
from farandole.launch.agent_connection import AgentConnection, StartError
from farandole.launch.agent_hosts import AgentHost, AgentHosts
from farandole.launch.blame import Ending
from farandole.launch.discovery import DiscoveryError, DiscoveryThread
from farandole.launch.hosts import Host
from farandole.launch.plan import ElasticOptions, cannot_run
from farandole.launch.ranks import JobRanks, Parts
from farandole.launch.slots import RankNumbers
from farandole.rendezvous import agent_messages, interfaces
from farandole.rendezvous.elastic.driver import ElasticDriver
from farandole.rendezvous.elastic.hub import ElasticHub
from farandole.rendezvous.elastic.members import Over, Start
from farandole.rendezvous.phases import Sends


class ElasticRanks(JobRanks):
    """See the module. `on_running(worker)` is called for each worker that has started."""

    def __init__(self, options: ElasticOptions, on_running: Callable[[int], None], *parts: *Parts) -> None:
        super().__init__(*parts)
        self.codes: list[int | None] = []  # only jobs of fixed size have them
        self.pids: list[int] = []
        self._options = options
        self._on_running = on_running
        self._driver = ElasticDriver(options.limits, package_version(), options.times)
        self._discovery_thread = DiscoveryThread(options.discovery, self._hosts_discovered, self._not_found)
        self._elastic: ElasticHub | None = None
        self._hosts: AgentHosts | None = None
        self._here: dict[str, bool] = {}  # host -> whether it is the launcher's own; belongs to discovery's thread
        self._where: dict[int, tuple[str, int]] = {}  # worker -> its host and process id
        self._was: dict[int, int] = {}  # worker -> its rank when it ended
        self._running: set[int] = set()
        self._outcome.runs = lambda: self._driver.state.runs

    # What a job asks.

    @property
    def refused(self) -> int:
        """How many unauthenticated connections the hub has refused."""
        return self._elastic.refused if self._elastic is not None else 0

    @property
    def joined(self) -> bool:
        """Whether a generation has run."""
        return self._driver.state.runs > 0

    def rank_of(self, worker: int) -> int:
        """The present rank of a worker, or its last rank if it has ended."""
        known = self._driver.state.workers.get(worker)
        return known.rank if known is not None and known.rank >= 0 else self._was.get(worker, worker)

    def host_of(self, worker: int) -> str:
        """The name of a worker's host."""
        return self._where.get(worker, ("?", 0))[0]

    def pid_of(self, worker: int) -> int:
        """The process id of a worker."""
        return self._where.get(worker, ("?", 0))[1]

    def status_text(self) -> str:
        """The state of the job, in a few words."""
        return f"{len(self._driver.state.members)} ranks run, generation {self._driver.state.last}"

    def running(self) -> list[int]:
        """The workers that run."""
        return sorted(self._running)

    def runs(self, worker: int) -> bool:
        """Whether a worker runs."""
        return worker in self._running

    def going_on(self) -> bool:
        """Whether the job has not ended."""
        return bool(self._running) if self._outcome.stopped else True

    def connection(self, worker: int) -> AgentConnection | None:
        """The connection to the agent of a worker; None when the host is lost."""
        host = self._hosts.hosts.get(self.host_of(worker)) if self._hosts is not None else None
        return host.connection if host is not None else None

    def start(self) -> None:
        """Returns when a host is ready. StartError when there is none."""
        discovery = self._options.discovery
        try:
            found = discovery.find()
        except DiscoveryError as error:
            raise StartError(str(error), topic="no-hosts") from None
        here = self._which_are_here(found)
        addresses = self._hub_addresses(all(here.values()) and discovery.fixed)
        self._elastic = ElasticHub(self._driver, self._agents.secret, addresses, self, self._agents.loop)
        self._hosts = AgentHosts(self._plan, self._options, self._agents, self._elastic, self, self._outcome, self._say)
        self._elastic.start(self._hosts.agent_reached_hub)
        self._hosts.start(found, here)
        self._discovery_thread.start()

    def stop(self) -> None:
        """The job ends: nothing is decided any more."""
        self._discovery_thread.stop()
        self._driver.stop()

    def close(self) -> None:
        """Ends discovery and the hub. Called when the connections to the agents have ended."""
        self._discovery_thread.close()
        if self._elastic is not None:
            self._elastic.close()

    def _which_are_here(self, found: list[Host]) -> dict[str, bool]:
        """Whether the agent of each host is a child of this process. Agents that connect to us themselves are not."""
        children = isinstance(self._plan.connector, ssh.SshOptions)
        names = [one.name for one in found]
        known = self._here
        self._here = {
            name: known[name] if name in known else children and interfaces.is_this_host(name) for name in names
        }
        return self._here

    def _hub_addresses(self, alone: bool) -> list[str]:
        try:
            addresses = [] if alone else [f"tcp:{one}" for one in interfaces.candidates(self._plan.interfaces)]
        except ValueError as error:
            raise StartError(str(error), topic="no-network") from None
        return addresses or ["tcp:127.0.0.1"]

    # Discovery, on its thread.

    def _hosts_discovered(self, found: list[Host]) -> None:
        here = self._which_are_here(found)

        def act() -> None:
            if not self._outcome.stopped and self._hosts is not None:
                self._hosts.found(found, here)

        self._agents.loop.call(act)

    def _not_found(self, text: str) -> None:
        self._agents.loop.call(lambda: self._say(f"{text}; the hosts stay as they are"))

    # What agent_hosts.py asks and tells. From here on all runs on the loop's thread.

    def on_host(self, name: str) -> list[int]:
        """The workers that run on a host."""
        return [worker for worker in self._running if self._where[worker][0] == name]

    def host_ready(self, host: AgentHost) -> None:
        """The agent of this host can start workers."""
        waiting, host.waiting = host.waiting, []
        for start in waiting:
            self._launch(host, start)

    def host_lost(self, name: str) -> None:
        """The agent of this host is lost, and its workers with it."""
        self._running.difference_update(self.on_host(name))

    # The messages of the agents.

    def on_report(self, connection: AgentConnection, report: Any) -> None:
        """Handles a report of an agent."""
        hosts = self._hosts
        assert hosts is not None
        host = hosts.of(connection)
        if host is not None:
            hosts.heard_from(host)
        if isinstance(report, agent_messages.Prepared):
            if host is not None:
                hosts.prepared(host, connection, report)
        elif isinstance(report, agent_messages.RankSilent):
            seconds, now = report.silent_ms / 1000, time.monotonic()
            self._deliver(self._driver.silence_reported(report.rank, seconds, report.state, now))
        elif isinstance(report, agent_messages.Running):
            self._where[report.rank] = (connection.name, report.pid)
            self._on_running(report.rank)
        elif isinstance(report, agent_messages.NotStarted):
            self._not_started(connection, report)
        elif isinstance(report, agent_messages.Ended):
            self._ended(report)
        elif isinstance(report, agent_messages.AgentSignaled):
            self._drain(connection, report.number)

    def lost(self, connection: AgentConnection, reason: str) -> None:
        """The connection to an agent has ended."""
        assert self._hosts is not None
        self._hosts.lost(connection, reason)

    def _not_started(self, connection: AgentConnection, report: agent_messages.NotStarted) -> None:
        text = cannot_run(connection.name if connection.host else "", report)
        self._running.discard(report.rank)
        if not self._driver.state.runs and self._hosts is not None and len(self._hosts.hosts) == 1:
            self._outcome.fail(127, text, topic="no-program")
            return
        self._say(text)
        self._deliver(self._driver.ended(report.rank, 127, report.text, time.monotonic()))

    def _ended(self, report: agent_messages.Ended) -> None:
        if report.rank not in self._running:
            return
        self._running.discard(report.rank)
        self._was[report.rank] = self.rank_of(report.rank)
        ending = self._read_ending(report)
        state = self._driver.state
        worker = state.workers.get(report.rank)
        if worker is None or not worker.dismissed:
            self._outcome.worker_ended(ending)
        text = f"has ended ({blame.describe(report.code, report.cause)})"
        if ending.failed and worker is not None and not worker.dismissed and worker.leaving is None:
            self._say(f"{state.name(worker)} {text}")
        self._deliver(self._driver.ended(report.rank, report.code, text, time.monotonic()))
        if ending.code == 0:
            self._on_ended(report.rank, report.code)

    def _read_ending(self, report: agent_messages.Ended) -> Ending:
        """The ending of a worker. The report names the blamed process by its rank; we translate it to a worker."""
        ending = Ending.read(self.rank_of(report.rank), report.code, self._outcome.stopped, report.cause, report.report)
        blames = ending.blames if ending.blames is None else self._driver.state.worker_of_rank.get(ending.blames, -1)
        return dataclasses.replace(ending, rank=report.rank, blames=blames)

    def _drain(self, connection: AgentConnection, number: int) -> None:
        """An agent got a signal: a scheduler, for example, wants its host back. Its ranks save and leave."""
        if self._outcome.stopped or connection.name not in self._driver.state.hosts:
            return
        seconds = self._options.limits.drain_timeout
        self._say(
            f"the agent on {connection.name} got {signal.Signals(number).name}: its ranks have {seconds:g} s to leave"
        )
        self._deliver(self._driver.drain(connection.name, seconds, time.monotonic()))

    def _deliver(self, sends: Sends) -> None:
        assert self._elastic is not None
        self._elastic.deliver(sends)

    # The decisions of the driver.

    def start_worker(self, start: Start) -> None:
        """Starts a worker, at once or when the agent of its host is ready."""
        assert self._hosts is not None
        self._launch(self._hosts.hosts[start.host], start)

    def kill_worker(self, worker: int) -> None:
        """Kills the process group of a worker, if it still runs."""
        connection = self.connection(worker)
        if connection is not None:
            connection.send(agent_messages.Signal(worker, signal.SIGKILL, 1))

    def say(self, text: str) -> None:
        """Tells the user."""
        self.on_warning(text)
        self._say(text)

    def job_over(self, over: Over) -> None:
        """Ends the job."""
        self._outcome.finish(over.failed, over.text)

    def _launch(self, host: AgentHost, start: Start) -> None:
        connection = host.connection
        if connection is None or not host.ready:
            host.waiting.append(start)
            return
        assert connection.prepared is not None
        if start.worker not in self._driver.state.workers:
            return  # the driver has given up this worker before it started
        threads, _ = self._plan.thread_variables(
            connection.prepared.cores, self._driver.state.hosts[start.host].slot_count
        )
        address = connection.prepared.addresses[0] if connection.prepared.addresses else "127.0.0.1"
        numbers = RankNumbers(*start.numbers, start.host)
        master = (address, connection.prepared.port)
        variables = {**environment.of_worker(start.worker, numbers, master, start.newcomer), **threads}
        self._where[start.worker] = (start.host, 0)
        self._running.add(start.worker)
        connection.send(self._plan.launch_message(start.worker, start.host, connection.prepared, variables))
