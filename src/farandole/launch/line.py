# The launcher's line to one agent: starts it, here or through ssh, proves each other, carries orders and reports.
# Touches processes through spawn.py, and the line's sockets.
"""A line is a pair of connected sockets; the far one is the input and output of the agent, or of the ssh to it."""

from __future__ import annotations

import collections
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from farandole.launch import spawn, ssh
from farandole.rendezvous import orders, sockets
from farandole.rendezvous.channel import Channel
from farandole.rendezvous.flow import READ, Flow, Loop, Wait, send
from farandole.rendezvous.handshake import NOBODY, Greeting, Proven, Refused, Role, VersionMismatch, call
from farandole.rendezvous.orders import MARK
from farandole.rendezvous.secret import Secret
from farandole.version import package_version

LONGEST_BANNER = 1 << 20  # what a login shell may print before the agent speaks
LONGEST_COMPLAINT = 16 << 10  # what is kept of the errors of ssh and the agent
NEVER_SPOKE_SECONDS = 0.5
PATIENCE_BYTES = 1 << 20  # on their way to an agent before the next piece of a call has to wait
WINDOW = 4  # pieces of calls on their way to one rank; a rank that does not read holds up nobody else
END_SECONDS = 20.0  # for an agent to kill what is left on its host; past that we do not wait for it


class StartError(Exception):
    """The job cannot be started; the text is for people, `code` for the shell."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


class Bridge(Protocol):
    """Another way to agents than ssh: they have called us themselves, and know the job's secret."""

    def take(self, host: str) -> tuple[Any, Any]:
        """The connection to the agent of a host, and something to wait for its end with; OSError: there is none now."""
        ...

    def explain(self, host: str, code: int | None, said: str) -> str:
        """Why there is no agent on a host."""
        ...


class Line:
    """`host` is "" for this machine. `heard(line, report)` and `ended(line, reason)` are called in the loop."""

    def __init__(
        self,
        loop: Loop,
        host: str,
        way: ssh.Way | Bridge,
        secret: Secret,
        heard: Callable[[Line, Any], None],
        ended: Callable[[Line, str], None],
    ) -> None:
        self.host = host
        self.name = host or "this host"
        self.directory = ""
        self.prepared: orders.Prepared | None = None
        self._loop = loop
        self._way = way
        self._secret = secret
        self._heard = heard
        self._ended = ended
        self._complaint = b""
        self._channel: Channel | None = None
        try:
            self._near, self._process = way.take(host) if not isinstance(way, ssh.Way) else self._start(way)
        except OSError as error:
            raise StartError(f"cannot open a line to {self.name}: {error.strerror or error}") from None
        self._errors = -1
        if self._process.stderr is not None:
            self._errors = self._process.stderr.fileno()
            os.set_blocking(self._errors, False)
            loop.watch(self._errors, READ, lambda _: self._read_errors())

    def _start(self, way: ssh.Way) -> tuple[Any, Any]:
        near, far = sockets.pair()
        try:
            command = way.command(self.host) if self.host else _here()
            return near, spawn.start_agent(command, far.fileno())
        except OSError as error:
            near.close()
            raise StartError(f"cannot start {command[0]}: {error.strerror}", 127) from None
        finally:
            far.close()

    def open(self, deadline: float, done: Callable[[], None], failed: Callable[[StartError], None]) -> None:
        """Proves each other until `deadline`; one of the two is called in the loop."""

        def over(proven: Proven | None, error: Exception | None) -> None:
            if proven is None:
                failed(self._explain(error))
                return
            self._channel = Channel(
                self._loop,
                self._near,
                proven,
                lambda report: self._heard(self, report),
                lambda reason: self._ended(self, reason),
                codec=orders,
            )
            done()

        self._loop.spawn(self._greet(), deadline, over)

    def send(self, order: Any) -> None:
        """An order to the agent."""
        if self._channel is not None:
            self._channel.send(order)

    @property
    def backlog(self) -> int:
        """Bytes that the agent has not read yet."""
        return self._channel.backlog if self._channel is not None else 0

    def when_drained(self, act: Callable[[], None]) -> None:
        """Calls `act` when the agent has read all that is on its way."""
        if self._channel is not None:
            self._channel.when_drained(act)

    def last_words(self) -> str:
        """What ssh or the agent complained about last, in brackets; nothing when they did not."""
        lines = self._complaint.decode(errors="replace").strip().splitlines()
        return f" ({lines[-1]})" if lines else ""

    @property
    def over(self) -> bool:
        """Whether its process has ended, so that `close` waits for nothing."""
        return bool(self._process.poll() is not None)

    def cut(self) -> None:
        """Ends the line; the agent kills everything on its host. Safe from any thread."""
        with contextlib.suppress(OSError):
            self._near.shutdown(2)

    def close(self) -> bool:
        """Cuts and waits until nothing is left on the host; False when that cannot be known. The loop stands still."""
        self.cut()
        if self._channel is not None:
            self._channel.close()
        if self._errors >= 0:
            self._loop.forget(self._errors)
        self._near.close()
        # Who never spoke as an agent has started nothing, and finds its input closed should it speak later.
        gone = self._channel is None
        try:
            self._process.wait(NEVER_SPOKE_SECONDS if gone else END_SECONDS)
            gone = True
        except Exception:  # subprocess.TimeoutExpired: only spawn.py knows it by name
            self._process.kill()
            self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()
        return gone

    def _read_errors(self) -> None:
        if self._errors < 0:
            return
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._errors, 4096)
            if not data:
                self._loop.forget(self._errors)
            self._complaint = (self._complaint + data)[-LONGEST_COMPLAINT:]

    def _greet(self) -> Flow[Proven]:
        version = yield from self._find_mark()
        if version != package_version():
            raise StartError(
                f"{self.name} has farandole {version}, this host {package_version()}: "
                "install the same version on every host"
            )
        if isinstance(self._way, ssh.Way):  # others have brought it
            yield from send(self._near, self._secret.key)
        return (yield from call(self._near, self._secret, Greeting(Role.LAUNCHER, 0, NOBODY), Role.AGENT))

    def _find_mark(self) -> Flow[str]:
        seen = b"\n"
        while not (MARK in seen and seen.endswith(b"\n")):
            try:
                data = self._near.recv(4096)
            except (BlockingIOError, InterruptedError):
                yield Wait(self._near, READ)
                continue
            if not data or len(seen) > LONGEST_BANNER:
                raise EOFError
            seen += data
        version, _, directory = seen.rpartition(MARK)[2].decode(errors="replace").strip().partition(" ")
        self.directory = directory
        return version

    def _explain(self, error: Exception | None) -> StartError:
        if isinstance(error, StartError):
            return error
        with contextlib.suppress(Exception):  # its last words and its code come right behind the end of its output
            self._process.wait(0.5)
        self._read_errors()
        said = self._complaint.decode(errors="replace").strip()
        if isinstance(error, TimeoutError):
            return StartError(
                f"{self.name} did not answer in time; is it up? Raise --start-timeout if it is only slow."
                + (f" ssh said: {said.splitlines()[-1]}" if said else "")
            )
        if isinstance(error, Refused | VersionMismatch):
            return StartError(f"the agent on {self.name}: {error}")
        if self.host:
            return StartError(self._way.explain(self.host, self._process.returncode, said))
        return StartError(f"the agent on this host ended before it began: {said or self._process.returncode}")


class Pump:
    """Sends calls to one rank, piece by piece, as fast as the rank and the line to its agent take them."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._calls: collections.deque[Iterator[orders.Call]] = collections.deque()
        self._credit = WINDOW
        self._waiting = False  # for the line

    def add(self, pieces: Iterator[orders.Call]) -> None:
        """One more call, after those before it."""
        self._calls.append(pieces)
        self._go_on()

    def taken(self) -> None:
        """The rank has read a piece."""
        self._credit += 1
        self._go_on()

    def _drained(self) -> None:
        self._waiting = False
        self._go_on()

    def _go_on(self) -> None:
        while self._calls and self._credit and not self._waiting:
            if self._line.backlog > PATIENCE_BYTES:
                self._waiting = True
                self._line.when_drained(self._drained)
            elif (piece := next(self._calls[0], None)) is not None:
                self._credit -= 1
                self._line.send(piece)
            else:
                self._calls.popleft()


def package_place() -> str:
    """The directory that has to be on the path for `import farandole`."""
    return str(Path(__file__).resolve().parents[2])


def _here() -> Sequence[str]:
    # -S and -E: nothing of the site or the environment is needed, and it starts twice as fast.
    start = f"import sys; sys.path.insert(0, {package_place()!r}); from farandole.launch.agent import main; main()"
    return [sys.executable, "-S", "-E", "-c", start]


def deadline_after(seconds: float) -> float:
    """A moment for `Line.open`."""
    return time.monotonic() + seconds
