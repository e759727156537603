# The agent of a host: starts ranks, forwards their output, kills them, reports their ends.
# Touches processes through spawn.py, its own input and output, the job's private directory.
"""`main()` runs on each host of a job: on the launcher's own host and on those reached by ssh.

The agent reads the launcher's messages from its input and answers on its output. When this connection ends, for any
reason, everything below this process is killed and nothing of the job is left on the host.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from farandole.base.version import package_version
from farandole.launch import environment, evidence, examine, guard, machine, spawn, watch
from farandole.rendezvous import agent_messages, interfaces, sockets
from farandole.rendezvous.channel import Channel
from farandole.rendezvous.flow import READ, Duplex, Flow, Loop, Stream, receive, send
from farandole.rendezvous.handshake import NOBODY, Greeting, Proven, Role, answer
from farandole.rendezvous.reach import probe_hub
from farandole.rendezvous.secret import SECRET_BYTES, Secret

GREETING_SECONDS = 60.0
REACH_SECONDS = 10.0  # to reach the hub at one of its addresses
REPORT_BYTES = 8192
CHUNK_BYTES = 64 << 10
# unsent bytes to the launcher above which the ranks' output and results have to wait
MAX_UNSENT_BYTES = 1 << 20
EXIT_SECONDS = 2.0  # for a worker without a channel for calls to end by itself
LAST_EXIT_SECONDS = 60.0  # the same for a worker that was told to end: its exit may save files
END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class _Rank:
    """A worker, its streams, the pipe for its failure report, its memory files, and its channel for calls."""

    def __init__(self, worker: spawn.Worker, report: int, files: examine.RankFiles) -> None:
        self.worker = worker
        self.report = report
        self.files = files
        self.calls: Channel | None = None
        self.early: list[
            agent_messages.Call
        ] = []  # what came before it had said hello; the launcher sends no more than a few
        self.told_to_end = False
        self.kill_reason = ""  # why the agent killed it
        self.streams = {worker.stdout: agent_messages.STDOUT, worker.stderr: agent_messages.STDERR}

    def close(self) -> None:
        os.close(self.report)
        self.files.close()
        self.worker.close()
        if self.calls is not None:
            self.calls.close()


class Agent:
    """Carries out the launcher's commands until the connection to it, or the guard, has ended."""

    def __init__(
        self, loop: Loop, directory: str, line: Duplex, guard_line: int, secret: Secret | None, base: dict[bytes, bytes]
    ) -> None:
        self._loop = loop
        self._directory = directory
        self._ranks: dict[int, _Rank] = {}
        self._environment = base
        self._command: list[bytes] = []
        self._port: object = None  # reserved, never listened on
        self._over = False
        self._full = False  # the connection is too slow, so the output of ranks is not read
        self._unwritten = 0  # bytes of output that the launcher has not written yet
        deadline = time.monotonic() + GREETING_SECONDS
        self._secret, proven = loop.finish(_introduce(line, directory, secret), deadline)
        self._secret_fd = self._secret.to_descriptor()
        self._channel = Channel(loop, line, proven, self._on_order, self._end, codec=agent_messages)
        self._memory = evidence.Memory()
        self._watcher: watch.Watcher | None = None  # of an elastic job
        self._hub = ""  # where it is reached
        self._probing = False
        self._orphaned = False  # the launcher is gone, and ranks save their state
        self._examination: examine.Examination | None = None
        self._listen_to_signals()
        loop.watch(guard_line, READ, lambda _: self._end("the guard is gone"))

    def run(self) -> None:
        """Works until the end."""
        while not self._over:
            self._loop.turn()

    def _end(self, _reason: str) -> None:
        if self._watcher is None or not self._watcher.saving or self._orphaned:
            self._over = True
            return
        # The ranks see it themselves: they agree on a step, save, and end.
        self._orphaned = True
        self._watcher.own.set_launcher_gone()
        self._loop.at("orphaned", time.monotonic() + self._watcher.times.drain_ms / 1000, lambda: self._end("late"))
        self._unwritten = 0
        self._full = False
        self._listen()
        self._collect()

    # Heartbeats, in an elastic job.

    def _watch_ranks(self, order: agent_messages.WatchRanks) -> None:
        self._watcher = watch.Watcher(order)
        self._watcher.last_message_at = time.monotonic()
        self._check_ranks()

    def _check_ranks(self) -> None:
        watcher = self._watcher
        assert watcher is not None
        now = time.monotonic()
        if self._orphaned:
            watcher.last_message_at = (
                now  # no launcher could go on without these ranks, so their silence does not count
            )
        due, reports = watcher.check(now)
        for report in reports:
            self._channel.send(report)
        if due:
            self._channel.send(agent_messages.Heartbeat(int(1000 * (now - watcher.last_message_at))))
            if watcher.cut_off and not self._probing and self._hub:
                # An interrupted connection may recover slowly, and in one direction only; a new connection is fast.
                self._probing = True
                flow = probe_hub(self._hub, self._secret, watcher.times.agent)
                self._loop.spawn(flow, now + 2 * watcher.times.heartbeat_ms / 1000, self._probed)
        self._loop.at("check", now + watcher.pause, self._check_ranks)

    def _ticked(self, tick: agent_messages.Heartbeat) -> None:
        if self._watcher is not None:
            self._watcher.launcher_silent_s = tick.launcher_silent_ms / 1000

    def _probed(self, answered: bool | None, _error: Exception | None) -> None:
        self._probing = False
        if answered and self._watcher is not None:
            self._watcher.last_message_at = time.monotonic()

    def _listen_to_signals(self) -> None:
        reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, *END_SIGNALS):
            signal.signal(number, lambda *_: None)

        def woken(_events: int) -> None:
            numbers = set(os.read(reader, 4096))
            if signal.SIGCHLD in numbers:
                self._collect()
            for number in sorted(numbers - {signal.SIGCHLD}):
                self._channel.send(agent_messages.AgentSignaled(number))

        self._loop.watch(reader, READ, woken)

    def _on_order(self, order: Any) -> None:
        act: dict[type[Any], Callable[[Any], None]] = {
            agent_messages.Prepare: self._prepare,
            agent_messages.Environment: self._add_environment,
            agent_messages.Command: self._add_words,
            agent_messages.Launch: self._launch,
            agent_messages.Signal: self._signal,
            agent_messages.Call: self._pass_on,
            agent_messages.OutputCredit: self._written,
            agent_messages.WatchRanks: self._watch_ranks,
            agent_messages.Heartbeat: self._ticked,
            agent_messages.Examine: self._examine,
        }
        if self._watcher is not None:
            self._watcher.last_message_at = time.monotonic()
        act[type(order)](order)

    # Before the ranks.

    def _prepare(self, order: agent_messages.Prepare) -> None:
        try:
            alone = order.addresses[0].startswith("unix:")  # a job on one host needs no network
            own = () if alone else tuple(interfaces.candidates(order.interfaces))
        except ValueError as error:
            self._prepared("", str(error), ())
            return
        left = set(order.addresses)
        reasons: list[str] = []

        def tried(address: str, _: bool | None, error: Exception | None) -> None:
            if not left:
                return  # another address was faster
            if error is None:
                left.clear()
                self._prepared(address, "", _nearest_first(own, address))
                return
            left.discard(address)
            reasons.append(f"{address}: {sockets.explain(error)}")
            if not left:
                self._prepared("", "; ".join(reasons), own)

        for address in order.addresses:
            deadline = time.monotonic() + REACH_SECONDS
            self._loop.spawn(probe_hub(address, self._secret), deadline, functools.partial(tried, address))

    def _prepared(self, address: str, reason: str, own: tuple[str, ...]) -> None:
        self._hub = address
        self._port, port = sockets.hold_port()
        self._channel.send(agent_messages.Prepared(address, reason, own, port, machine.usable_cores()))

    def _add_environment(self, order: agent_messages.Environment) -> None:
        self._environment.update(_variables(order.variables))

    def _add_words(self, order: agent_messages.Command) -> None:
        self._command += order.words

    # Start and end of ranks.

    def _launch(self, order: agent_messages.Launch) -> None:
        reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        inherit = [self._secret_fd, writer]
        variables = {**self._environment, **_variables(order.variables)}
        variables.update(environment.keeping_memory(variables))
        variables[b"FARANDOLE_SECRET_FD"] = b"%d" % self._secret_fd
        variables[b"FARANDOLE_REPORT_FD"] = b"%d" % writer
        variables[b"FARANDOLE_REPORT_PIPE"] = b"%d" % os.fstat(writer).st_ino
        variables[b"FARANDOLE_PRIVATE_DIRECTORY"] = os.fsencode(self._directory)
        files = examine.RankFiles()
        inherit += files.fds
        variables[b"FARANDOLE_RECORD_FD"], variables[b"FARANDOLE_STACKS_FD"] = (b"%d" % fd for fd in files.fds)
        page: watch.StatusPage | None = None
        if self._watcher is not None:
            page = watch.StatusPage()
            inherit += [page.fd, self._watcher.own_reader]
            variables[b"FARANDOLE_PULSE_FD"] = b"%d" % page.fd
            variables[b"FARANDOLE_AGENT_PULSE_FD"] = b"%d" % self._watcher.own_reader
        own_end = rank_end = None
        if order.calls:
            own_end, rank_end = sockets.pair()
            inherit.append(rank_end.fileno())
            variables[b"FARANDOLE_CALLS_FD"] = b"%d" % rank_end.fileno()
        try:
            worker = spawn.start_worker(self._command, variables, order.directory, inherit)
        except OSError as error:
            os.close(reader)
            files.close()
            if own_end is not None:
                own_end.close()
            if page is not None:
                page.close()
            self._channel.send(
                agent_messages.NotStarted(order.rank, error.errno or 0, _explain(error, self._command[0]))
            )
            return
        finally:
            os.close(writer)
            if rank_end is not None:
                rank_end.close()
        rank = self._ranks[order.rank] = _Rank(worker, reader, files)
        if self._watcher is not None and page is not None:
            self._watcher.add(order.rank, worker.pid, page)
        self._listen(order.rank)
        self._loop.at("waiting", time.monotonic() + examine.CHECK_SECONDS, self._report_waiting)
        self._channel.send(agent_messages.Running(order.rank, worker.pid))
        if own_end is not None:
            self._connect(rank, own_end)

    def _signal(self, order: agent_messages.Signal) -> None:
        for number, rank in self._ranks.items():
            if order.rank in (number, agent_messages.ALL):
                rank.worker.send(order.number, bool(order.group))

    def _collect(self) -> None:
        """Reaps children that have ended, and reports those that are ranks."""
        while not self._full and (pid := spawn.next_dead_child()):
            number = next((number for number, rank in self._ranks.items() if rank.worker.pid == pid), None)
            if number is None:
                spawn.reap_child(pid)
            else:
                self._ended(number)

    def _ended(self, number: int) -> None:
        rank = self._ranks.pop(number)
        self._loop.at(rank, None, lambda: None)
        for descriptor in rank.streams:
            self._loop.forget(descriptor)
        cause = self._memory.cause(rank.worker.pid) or rank.kill_reason
        code = rank.worker.reap()
        spawn.end_orphans(number, rank.worker.pid, {other.worker.pid: key for key, other in self._ranks.items()})
        for descriptor, stream in rank.streams.items():
            while data := _read(descriptor):  # no more than a pipe holds
                self._pass_output(number, stream, data)
            self._pass_output(number, stream, b"")
        report = (_read(rank.report, REPORT_BYTES) or b"").decode(errors="replace")
        if self._examination is not None:
            self._examination.forget(number)
        last = rank.files.compressed_record() if code else b""
        self._report(agent_messages.Ended(number, code, report, cause if code == 128 + signal.SIGKILL else "", last))
        rank.close()
        if self._watcher is not None:
            self._watcher.forget(number)
        if self._orphaned and not self._ranks:
            self._over = True

    # What the ranks wait for.

    def _report_waiting(self) -> None:
        now = time.monotonic()
        for number, rank in self._ranks.items() if not self._orphaned else ():
            waited = rank.files.waiting(time.monotonic_ns())
            if waited is not None:
                self._channel.send(agent_messages.RankWaits(number, waited // 1_000_000))
        self._loop.at("waiting", now + examine.CHECK_SECONDS, self._report_waiting)

    def _examine(self, order: agent_messages.Examine) -> None:
        ranks = {number: (rank.worker.pid, rank.files) for number, rank in self._ranks.items()}
        self._examination = examine.Examination(order.number, ranks, self._channel.send)
        self._go_on_examining()

    def _go_on_examining(self) -> None:
        now = time.monotonic()
        if self._examination is not None and self._examination.turn(now):
            self._loop.at("examine", now + examine.TURN_SECONDS, self._go_on_examining)
        else:
            self._examination = None

    # The ranks' output and results. The connection to the launcher is always read, because signals and its end come
    # there.

    def _report(self, what: agent_messages.AgentMessage) -> None:
        self._channel.send(what)
        if not self._full and self._channel.backlog > MAX_UNSENT_BYTES:
            self._full = True
            self._channel.when_drained(self._go_on)
            self._listen()

    def _go_on(self) -> None:
        self._full = False
        self._listen()
        self._collect()

    def _listen(self, *numbers: int) -> None:
        """Reads the output of these ranks, or of all; stops while the connection or the launcher is too slow."""
        hush = self._full or self._unwritten > MAX_UNSENT_BYTES
        for number in numbers or self._ranks:
            rank = self._ranks[number]
            if rank.calls is not None:
                (rank.calls.pause if self._full else rank.calls.resume)()
            for descriptor, stream in rank.streams.items():
                if hush:
                    self._loop.forget(descriptor)
                else:
                    self._loop.watch(descriptor, READ, functools.partial(self._printed, number, descriptor, stream))

    def _printed(self, number: int, descriptor: int, stream: int, _events: int) -> None:
        data = _read(descriptor)
        if data is None:
            return
        if not data:
            self._loop.forget(descriptor)  # the end is reported with that of the rank
            return
        self._pass_output(number, stream, data)

    def _pass_output(self, number: int, stream: int, data: bytes) -> None:
        if self._orphaned:
            return
        before = self._unwritten
        self._unwritten += len(data)
        self._report(agent_messages.Output(number, stream, data))
        if before <= MAX_UNSENT_BYTES < self._unwritten:
            self._listen()

    def _written(self, order: agent_messages.OutputCredit) -> None:
        before = self._unwritten
        self._unwritten -= order.count
        if self._unwritten <= MAX_UNSENT_BYTES < before:
            self._listen()

    # Calls for ranks that wait for them.

    def _connect(self, rank: _Rank, own_end: Stream) -> None:
        number = next(key for key, value in self._ranks.items() if value is rank)
        flow = answer(own_end, self._secret, Greeting(Role.HUB, NOBODY, 0), lambda peer: peer.rank == number)

        def lost(reason: str) -> None:
            def part() -> None:
                rank.kill_reason = f"killed, because its channel for calls was lost: {reason}"
                rank.worker.send(signal.SIGKILL, True)

            if number in self._ranks:  # usually it is ending; if it runs on it would never answer
                seconds = LAST_EXIT_SECONDS if rank.told_to_end else EXIT_SECONDS
                self._loop.at(rank, time.monotonic() + seconds, part)

        def on_call(order: Any) -> None:
            if (
                isinstance(order, agent_messages.Call) and order.last
            ):  # output from before a result is sent before the result
                for descriptor, stream in rank.streams.items():
                    if data := _read(descriptor):
                        self._pass_output(number, stream, data)
            self._report(order)

        def done(proven: Proven | None, error: Exception | None) -> None:
            if proven is None or number not in self._ranks:
                own_end.close()
                lost(str(error))
                return
            rank.calls = Channel(self._loop, own_end, proven, on_call, lost, codec=agent_messages)
            self._listen(number)
            early, rank.early = rank.early, []
            for order in early:
                rank.calls.send(order)

        self._loop.spawn(flow, None, done)  # some take minutes to start

    def _pass_on(self, order: agent_messages.Call) -> None:
        rank = self._ranks.get(order.rank)
        if rank is None:
            return
        rank.told_to_end = rank.told_to_end or order.kind == agent_messages.END
        if rank.calls is None:
            rank.early.append(order)
        else:
            rank.calls.send(order)


def _nearest_first(own: tuple[str, ...], hub: str) -> tuple[str, ...]:
    """The addresses of this host; first the one that the launcher uses, which others can most likely use too."""
    sockaddr = sockets.split(hub)
    if isinstance(sockaddr, str):
        return own
    with contextlib.suppress(OSError):
        return tuple(dict.fromkeys([interfaces.source_address(*sockaddr), *own]))
    return own


def _introduce(line: Duplex, directory: str, known: Secret | None) -> Flow[tuple[Secret, Proven]]:
    """Introduces this agent, receives the secret unless it is known, and authenticates."""
    words = f"{package_version()} {directory}\n".encode()
    yield from send(line, agent_messages.MARK + words)
    secret = known or Secret((yield from receive(line, SECRET_BYTES)))
    me = Greeting(Role.AGENT, NOBODY, 0)
    return secret, (yield from answer(line, secret, me, lambda peer: peer.role is Role.LAUNCHER))


def _variables(entries: tuple[bytes, ...]) -> dict[bytes, bytes]:
    return {name: value for name, _, value in (entry.partition(b"=") for entry in entries)}


def _read(descriptor: int, count: int = CHUNK_BYTES) -> bytes | None:
    """What is there; empty at the end; None when there is nothing now."""
    try:
        return os.read(descriptor, count)
    except BlockingIOError:
        return None


def _explain(error: OSError, program: bytes) -> str:
    # subprocess names the directory when it is the directory that is missing.
    what = os.fsdecode(error.filename) if error.filename else os.fsdecode(program)
    return f"{what}: {error.strerror or error}"


def main(secret: Secret | None = None, base: dict[bytes, bytes] | None = None) -> None:
    """Runs the agent, with its guard over it; never returns. `secret`: the job's, where the line does not bring it;
    `base`: the variables that ranks get from here, if they are not just those of the host."""
    directory = sockets.private_directory()
    guard_line = guard.stand(directory)
    spawn.become("farandole-agent")
    line = Duplex(os.dup(0), os.dup(1))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nowhere, descriptor)
    code = 1
    try:
        with contextlib.suppress(EOFError, TimeoutError, ConnectionError):
            here = environment.of_this_host(os.environb) if base is None else base
            Agent(Loop(), directory, line, guard_line, secret, here).run()
            code = 0
    finally:
        spawn.end_descendants()
        sockets.remove_directory(directory)
        if code == 0 or sys.exc_info()[0] is None:
            os._exit(code)
