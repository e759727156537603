# The launcher's connection to one agent: starts it, here or through ssh, authenticates both sides, carries messages.
# Touches processes through spawn.py, and the connection's sockets.
"""A connection is a socket pair; its far end is the input and output of the agent, or of the ssh process to it."""

from __future__ import annotations

import collections
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from farandole.base.version import package_version
from farandole.launch import spawn, ssh
from farandole.rendezvous import agent_messages, sockets
from farandole.rendezvous.agent_messages import MARK
from farandole.rendezvous.channel import Channel
from farandole.rendezvous.flow import READ, Flow, Loop, Wait, send
from farandole.rendezvous.handshake import NOBODY, Greeting, Proven, Refused, Role, VersionMismatch, call
from farandole.rendezvous.secret import Secret

LONGEST_BANNER = 1 << 20  # bytes that a login shell may print before the agent's first message
LONGEST_COMPLAINT = 16 << 10  # bytes that are kept of the error output of ssh and the agent
NEVER_SPOKE_SECONDS = 0.5
PATIENCE_BYTES = 1 << 20  # unsent bytes to an agent above which the next piece of a call waits
WINDOW = 4  # pieces of calls in flight to one rank; a rank that does not read blocks no other
END_SECONDS = 20.0  # for an agent to kill everything on its host; after that the launcher does not wait


class StartError(Exception):
    """The job cannot be started; the text is for the user, `code` is the exit code."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


class Bridge(Protocol):
    """A way to agents without ssh: they connect to the launcher and know the job's secret."""

    def take(self, host: str) -> tuple[Any, Any]:
        """The connection to the agent of a host, and its process; OSError when there is none yet."""
        ...

    def explain(self, host: str, code: int | None, said: str) -> str:
        """Why there is no agent on a host."""
        ...


class AgentConnection:
    """`host`: "" is this machine. `heard(connection, report)` and `ended(connection, reason)` run in the loop."""

    def __init__(
        self,
        loop: Loop,
        host: str,
        way: ssh.SshOptions | Bridge,
        secret: Secret,
        heard: Callable[[AgentConnection, Any], None],
        ended: Callable[[AgentConnection, str], None],
    ) -> None:
        self.host = host
        self.name = host or "this host"
        self.directory = ""
        self.prepared: agent_messages.Prepared | None = None
        self._loop = loop
        self._way = way
        self._secret = secret
        self._heard = heard
        self._ended = ended
        self._complaint = b""
        self._channel: Channel | None = None
        try:
            self._near, self._process = way.take(host) if not isinstance(way, ssh.SshOptions) else self._start(way)
        except OSError as error:
            raise StartError(f"cannot open a connection to {self.name}: {error.strerror or error}") from None
        self._errors = -1
        if self._process.stderr is not None:
            self._errors = self._process.stderr.fileno()
            os.set_blocking(self._errors, False)
            loop.watch(self._errors, READ, lambda _: self._read_errors())

    def _start(self, way: ssh.SshOptions) -> tuple[Any, Any]:
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
        """Authenticates both sides until `deadline`; then calls one of the two functions on the loop's thread."""

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
                codec=agent_messages,
            )
            done()

        self._loop.spawn(self._greet(), deadline, over)

    def send(self, order: Any) -> None:
        """Sends a message to the agent."""
        if self._channel is not None:
            self._channel.send(order)

    @property
    def backlog(self) -> int:
        """Bytes that the agent has not read yet."""
        return self._channel.backlog if self._channel is not None else 0

    def when_drained(self, act: Callable[[], None]) -> None:
        """Calls `act` when the agent has read all queued bytes."""
        if self._channel is not None:
            self._channel.when_drained(act)

    def last_words(self) -> str:
        """The last error output of ssh or the agent, in brackets; empty without any."""
        lines = self._complaint.decode(errors="replace").strip().splitlines()
        return f" ({lines[-1]})" if lines else ""

    @property
    def over(self) -> bool:
        """Whether its process has ended, so that `close` does not wait."""
        return bool(self._process.poll() is not None)

    def cut(self) -> None:
        """Ends the connection; the agent then kills everything on its host. Safe from any thread."""
        with contextlib.suppress(OSError):
            self._near.shutdown(2)

    def close(self) -> bool:
        """Cuts the connection and waits until nothing is left on the host; False if that is unknown.

        Blocks the loop.
        """
        self.cut()
        if self._channel is not None:
            self._channel.close()
        if self._errors >= 0:
            self._loop.forget(self._errors)
        self._near.close()
        # A process that never authenticated has started nothing; if it starts later it finds its input closed.
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
        if isinstance(self._way, ssh.SshOptions):  # another launcher has started it
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
        with contextlib.suppress(Exception):  # its last error output and its exit code follow the end of its output
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
    """Sends calls to one rank in pieces, as fast as the rank and its agent read them."""

    def __init__(self, connection: AgentConnection) -> None:
        self._connection = connection
        self._calls: collections.deque[Iterator[agent_messages.Call]] = collections.deque()
        self._credit = WINDOW
        self._waiting = False  # for the connection

    def add(self, pieces: Iterator[agent_messages.Call]) -> None:
        """Adds a call after those before it."""
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
            if self._connection.backlog > PATIENCE_BYTES:
                self._waiting = True
                self._connection.when_drained(self._drained)
            elif (piece := next(self._calls[0], None)) is not None:
                self._credit -= 1
                self._connection.send(piece)
            else:
                self._calls.popleft()


def package_place() -> str:
    """The directory that must be on the path for `import farandole`."""
    return str(Path(__file__).resolve().parents[2])


def _here() -> Sequence[str]:
    # -S and -E: the agent needs neither site packages nor the environment, and starts twice as fast.
    start = f"import sys; sys.path.insert(0, {package_place()!r}); from farandole.launch.agent import main; main()"
    return [sys.executable, "-S", "-E", "-c", start]


def deadline_after(seconds: float) -> float:
    """A moment for `AgentConnection.open`."""
    return time.monotonic() + seconds
