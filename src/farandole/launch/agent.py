# The agent of a host: starts the ranks it is told to, passes on what they print, ends them, reports their ends.
# Touches processes through spawn.py, its own input and output, the job's private directory.
"""`main()` is what runs on each host of a job, on the launcher's own as on those behind ssh.

The launcher is heard over our input and spoken to over our output. When that line ends, for whatever reason, everything
below this process is killed and nothing of the job is left on the host.
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

from farandole.launch import environment, evidence, guard, machine, spawn, watch
from farandole.rendezvous import interfaces, orders, sockets
from farandole.rendezvous.channel import Channel
from farandole.rendezvous.flow import READ, Duplex, Flow, Loop, Stream, receive, send
from farandole.rendezvous.handshake import NOBODY, Greeting, Proven, Role, answer
from farandole.rendezvous.reach import knock
from farandole.rendezvous.secret import SECRET_BYTES, Secret
from farandole.version import package_version

GREETING_SECONDS = 60.0
REACH_SECONDS = 10.0  # to reach the hub at one of its addresses
REPORT_BYTES = 8192
CHUNK_BYTES = 64 << 10
PATIENCE_BYTES = 1 << 20  # so much may wait for the launcher before ranks have to wait with what they print and return
PARTING_SECONDS = 2.0  # for a worker without a channel for calls to end by itself
ASKS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class _Rank:
    """A worker, its streams, its way to tell of a failure, and its channel for calls."""

    def __init__(self, worker: spawn.Worker, report: int, calls: Channel | None) -> None:
        self.worker = worker
        self.report = report
        self.calls = calls
        self.early: list[orders.Call] = []  # what came before it had said hello; the launcher sends no more than a few
        self.complaint = ""  # why we killed it
        self.streams = {worker.stdout: orders.STDOUT, worker.stderr: orders.STDERR}

    def close(self) -> None:
        os.close(self.report)
        self.worker.close()
        if self.calls is not None:
            self.calls.close()


class Agent:
    """Carries out orders until the line to the launcher, or the guard, is gone."""

    def __init__(
        self, loop: Loop, directory: str, line: Duplex, guard_line: int, secret: Secret | None, base: dict[bytes, bytes]
    ) -> None:
        self._loop = loop
        self._directory = directory
        self._ranks: dict[int, _Rank] = {}
        self._environment = base
        self._command: list[bytes] = []
        self._port: object = None  # held, never listened on
        self._over = False
        self._full = False  # the line does not keep up, so nothing that ranks say is read
        self._unwritten = 0  # bytes of output that the launcher has not written yet
        deadline = time.monotonic() + GREETING_SECONDS
        self._secret, proven = loop.finish(_introduce(line, directory, secret), deadline)
        self._secret_fd = self._secret.to_descriptor()
        self._channel = Channel(loop, line, proven, self._heard, self._end, codec=orders)
        self._memory = evidence.Memory()
        self._watcher: watch.Watcher | None = None  # of an elastic job
        self._hub = ""  # where it is reached
        self._knocking = False
        self._orphaned = False  # the launcher is gone, and ranks save what they have
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
        # The ranks have seen it themselves: they agree on a step, save, and end.
        self._orphaned = True
        self._watcher.own.leave_alone()
        self._loop.at("orphaned", time.monotonic() + self._watcher.times.drain_ms / 1000, lambda: self._end("late"))
        self._unwritten = 0
        self._full = False
        self._listen()
        self._collect()

    # Signs of life, in an elastic job.

    def _watch_ranks(self, order: orders.Watch) -> None:
        self._watcher = watch.Watcher(order)
        self._watcher.heard = time.monotonic()
        self._look()

    def _look(self) -> None:
        watcher = self._watcher
        assert watcher is not None
        now = time.monotonic()
        if self._orphaned:
            watcher.heard = now  # nobody is left who could go on without these ranks: they may take their time
        due, reports = watcher.look(now)
        for report in reports:
            self._channel.send(report)
        if due:
            self._channel.send(orders.Tick(int(1000 * (now - watcher.heard))))
            if watcher.cut_off and not self._knocking and self._hub:
                # A line that was cut may take long to come back by itself, and one way longer than the other; a new
                # connection does not.
                self._knocking = True
                flow = knock(self._hub, self._secret, watcher.times.agent)
                self._loop.spawn(flow, now + 2 * watcher.times.beat_ms / 1000, self._knocked)
        self._loop.at("look", now + watcher.pause, self._look)

    def _ticked(self, tick: orders.Tick) -> None:
        if self._watcher is not None:
            self._watcher.unheard = tick.unheard_ms / 1000

    def _knocked(self, answered: bool | None, _error: Exception | None) -> None:
        self._knocking = False
        if answered and self._watcher is not None:
            self._watcher.heard = time.monotonic()

    def _listen_to_signals(self) -> None:
        reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, *ASKS):
            signal.signal(number, lambda *_: None)

        def woken(_events: int) -> None:
            numbers = set(os.read(reader, 4096))
            if signal.SIGCHLD in numbers:
                self._collect()
            for number in sorted(numbers - {signal.SIGCHLD}):
                self._channel.send(orders.Asked(number))

        self._loop.watch(reader, READ, woken)

    def _heard(self, order: Any) -> None:
        act: dict[type[Any], Callable[[Any], None]] = {
            orders.Prepare: self._prepare,
            orders.Environment: self._add_environment,
            orders.Command: self._add_words,
            orders.Launch: self._launch,
            orders.Signal: self._signal,
            orders.Call: self._pass_on,
            orders.Written: self._written,
            orders.Watch: self._watch_ranks,
            orders.Tick: self._ticked,
        }
        if self._watcher is not None:
            self._watcher.heard = time.monotonic()
        act[type(order)](order)

    # Before the ranks.

    def _prepare(self, order: orders.Prepare) -> None:
        try:
            alone = order.addresses[0].startswith("unix:")  # a job on this host needs no network
            own = () if alone else tuple(interfaces.candidates(order.interfaces))
        except ValueError as error:
            self._prepared("", str(error), ())
            return
        left = set(order.addresses)
        reasons: list[str] = []

        def tried(address: str, _: bool | None, error: Exception | None) -> None:
            if not left:
                return  # another one was quicker
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
            self._loop.spawn(knock(address, self._secret), deadline, functools.partial(tried, address))

    def _prepared(self, address: str, reason: str, own: tuple[str, ...]) -> None:
        self._hub = address
        self._port, port = sockets.hold_port()
        self._channel.send(orders.Prepared(address, reason, own, port, machine.usable_cores()))

    def _add_environment(self, order: orders.Environment) -> None:
        self._environment.update(_variables(order.variables))

    def _add_words(self, order: orders.Command) -> None:
        self._command += order.words

    # The ranks' lives.

    def _launch(self, order: orders.Launch) -> None:
        reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        inherit = [self._secret_fd, writer]
        variables = {**self._environment, **_variables(order.variables)}
        variables.update(environment.keeping_memory(variables))
        variables[b"FARANDOLE_SECRET_FD"] = b"%d" % self._secret_fd
        variables[b"FARANDOLE_REPORT_FD"] = b"%d" % writer
        variables[b"FARANDOLE_PRIVATE_DIRECTORY"] = os.fsencode(self._directory)
        word: watch.Word | None = None
        if self._watcher is not None:
            word = watch.Word()
            inherit += [word.fd, self._watcher.own_reader]
            variables[b"FARANDOLE_PULSE_FD"] = b"%d" % word.fd
            variables[b"FARANDOLE_AGENT_PULSE_FD"] = b"%d" % self._watcher.own_reader
        near = far = None
        if order.calls:
            near, far = sockets.pair()
            inherit.append(far.fileno())
            variables[b"FARANDOLE_CALLS_FD"] = b"%d" % far.fileno()
        try:
            worker = spawn.start_worker(self._command, variables, order.directory, inherit)
        except OSError as error:
            os.close(reader)
            if near is not None:
                near.close()
            if word is not None:
                word.close()
            self._channel.send(orders.NotStarted(order.rank, error.errno or 0, _explain(error, self._command[0])))
            return
        finally:
            os.close(writer)
            if far is not None:
                far.close()
        rank = self._ranks[order.rank] = _Rank(worker, reader, None)
        if self._watcher is not None and word is not None:
            self._watcher.add(order.rank, worker.pid, word)
        self._listen(order.rank)
        self._channel.send(orders.Running(order.rank, worker.pid))
        if near is not None:
            self._connect(rank, near)

    def _signal(self, order: orders.Signal) -> None:
        for number, rank in self._ranks.items():
            if order.rank in (number, orders.ALL):
                rank.worker.send(order.number, bool(order.group))

    def _collect(self) -> None:
        """Children that have ended: ranks are reported, orphans buried."""
        while not self._full and (pid := spawn.next_dead_child()):
            number = next((number for number, rank in self._ranks.items() if rank.worker.pid == pid), None)
            if number is None:
                spawn.bury(pid)
            else:
                self._ended(number)

    def _ended(self, number: int) -> None:
        rank = self._ranks.pop(number)
        self._loop.at(rank, None, lambda: None)
        for descriptor in rank.streams:
            self._loop.forget(descriptor)
        cause = self._memory.cause(rank.worker.pid) or rank.complaint
        code = rank.worker.reap()
        spawn.end_orphans(number, rank.worker.pid, {other.worker.pid: key for key, other in self._ranks.items()})
        for descriptor, stream in rank.streams.items():
            while data := _read(descriptor):  # no more than a pipe holds
                self._pass_output(number, stream, data)
            self._pass_output(number, stream, b"")
        report = (_read(rank.report, REPORT_BYTES) or b"").decode(errors="replace")
        self._report(orders.Ended(number, code, report, cause if code == 128 + signal.SIGKILL else ""))
        rank.close()
        if self._watcher is not None:
            self._watcher.forget(number)
        if self._orphaned and not self._ranks:
            self._over = True

    # What the ranks print and return. The line to the launcher itself is always read: signals come by it, and its end.

    def _report(self, what: orders.Order) -> None:
        self._channel.send(what)
        if not self._full and self._channel.backlog > PATIENCE_BYTES:
            self._full = True
            self._channel.when_drained(self._go_on)
            self._listen()

    def _go_on(self) -> None:
        self._full = False
        self._listen()
        self._collect()

    def _listen(self, *numbers: int) -> None:
        """Reads what these ranks, or all, say; or lets them wait until line (and, with output, launcher) keep up."""
        hush = self._full or self._unwritten > PATIENCE_BYTES
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
        self._report(orders.Output(number, stream, data))
        if before <= PATIENCE_BYTES < self._unwritten:
            self._listen()

    def _written(self, order: orders.Written) -> None:
        before = self._unwritten
        self._unwritten -= order.count
        if self._unwritten <= PATIENCE_BYTES < before:
            self._listen()

    # Calls for ranks that wait for them.

    def _connect(self, rank: _Rank, near: Stream) -> None:
        number = next(key for key, value in self._ranks.items() if value is rank)
        flow = answer(near, self._secret, Greeting(Role.HUB, NOBODY, 0), lambda peer: peer.rank == number)

        def lost(reason: str) -> None:
            def part() -> None:
                rank.complaint = f"killed, because its channel for calls was lost: {reason}"
                rank.worker.send(signal.SIGKILL, True)

            if number in self._ranks:  # mostly it is just ending; one that goes on would never answer
                self._loop.at(rank, time.monotonic() + PARTING_SECONDS, part)

        def heard(order: Any) -> None:
            if isinstance(order, orders.Call) and order.last:  # what was printed before a result comes before it
                for descriptor, stream in rank.streams.items():
                    if data := _read(descriptor):
                        self._pass_output(number, stream, data)
            self._report(order)

        def done(proven: Proven | None, error: Exception | None) -> None:
            if proven is None or number not in self._ranks:
                near.close()
                lost(str(error))
                return
            rank.calls = Channel(self._loop, near, proven, heard, lost, codec=orders)
            self._listen(number)
            early, rank.early = rank.early, []
            for order in early:
                rank.calls.send(order)

        self._loop.spawn(flow, None, done)  # some take minutes to start

    def _pass_on(self, order: orders.Call) -> None:
        rank = self._ranks.get(order.rank)
        if rank is not None and rank.calls is None:
            rank.early.append(order)
        elif rank is not None and rank.calls is not None:
            rank.calls.send(order)


def _nearest_first(own: tuple[str, ...], hub: str) -> tuple[str, ...]:
    """The addresses of this host, first the one by which the launcher, and so most likely the others, reach it."""
    place = sockets.split(hub)
    if isinstance(place, str):
        return own
    with contextlib.suppress(OSError):
        return tuple(dict.fromkeys([interfaces.towards(*place), *own]))
    return own


def _introduce(line: Duplex, directory: str, known: Secret | None) -> Flow[tuple[Secret, Proven]]:
    """Says who we are, gets the secret unless it is known, proves it."""
    words = f"{package_version()} {directory}\n".encode()
    yield from send(line, orders.MARK + words)
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
