# The launcher's connection to one agent. It starts the agent, on this host or through ssh, authenticates both sides,
# and carries messages.
# Touches processes through spawn.py, and the connection's sockets.
"""A connection is a socket pair. The launcher has one socket; the other one is the standard input and output of the
agent, or of the ssh process that starts the agent on another host.
"""

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

MAX_BANNER_BYTES = 1 << 20  # what a login shell may print before the agent's first message
MAX_ERROR_BYTES = 16 << 10  # how much of the error output of ssh and the agent is kept
UNAUTHENTICATED_END_SECONDS = 0.5  # for a process that has not authenticated to end
MAX_UNSENT_BYTES = 1 << 20  # to one agent; with more, the next piece of a call waits
WINDOW = 4  # pieces of calls in flight to one rank, so that a rank that does not read does not block others
END_SECONDS = 20.0  # for an agent to kill everything on its host; then the launcher stops waiting


class StartError(Exception):
    """The job cannot be started; the text is for the user, `code` is the launcher's exit code.

    `topic` is a section of docs/errors.md; the text ends with it.
    """

    def __init__(self, text: str, code: int = 1, *, topic: str) -> None:
        super().__init__(f"{text} [{topic}]")
        self.code = code


class Bridge(Protocol):
    """Gives connections to agents without ssh. These agents connect to the launcher, and know the job's secret."""

    def take(self, host: str) -> tuple[Any, Any]:
        """The connection to the agent of a host, and the agent's process. Raises OSError when there is no agent yet."""
        ...

    def explain(self, host: str, code: int | None, error_output: str) -> str:
        """Says why there is no agent on a host: `code` is the exit code of its process, `error_output` what it
        printed to stderr."""
        ...


class AgentConnection:
    """A connection to the agent of `host`; "" is this host.

    The loop calls `on_report(connection, report)` for each message of the agent. At the end it calls
    `ended(connection, reason)`, unless `close` was called before.
    """

    def __init__(
        self,
        loop: Loop,
        host: str,
        connector: ssh.SshOptions | Bridge,
        secret: Secret,
        on_report: Callable[[AgentConnection, Any], None],
        ended: Callable[[AgentConnection, str], None],
    ) -> None:
        self.host = host
        self.name = host or "this host"
        self.directory = ""
        self.prepared: agent_messages.Prepared | None = None
        self._loop = loop
        self._connector = connector
        self._secret = secret
        self._on_report = on_report
        self._ended = ended
        self._error_output = b""
        self._channel: Channel | None = None
        try:
            self._sock, self._process = (
                connector.take(host) if not isinstance(connector, ssh.SshOptions) else self._start(connector)
            )
        except OSError as error:
            raise StartError(
                f"cannot open a connection to {self.name}: {error.strerror or error}", topic="no-agent"
            ) from None
        self._stderr = -1
        if self._process.stderr is not None:
            self._stderr = self._process.stderr.fileno()
            os.set_blocking(self._stderr, False)
            loop.watch(self._stderr, READ, lambda _: self._read_errors())

    def _start(self, connector: ssh.SshOptions) -> tuple[Any, Any]:
        own_end, agent_end = sockets.pair()
        try:
            command = connector.command(self.host) if self.host else _local_command()
            return own_end, spawn.start_agent(command, agent_end.fileno())
        except OSError as error:
            own_end.close()
            raise StartError(f"cannot start {command[0]}: {error.strerror}", 127, topic="no-agent") from None
        finally:
            agent_end.close()

    def open(self, deadline: float, done: Callable[[], None], failed: Callable[[StartError], None]) -> None:
        """Authenticates both sides. The loop then calls `done`; after an error or at `deadline` it calls `failed`."""

        def finish(proven: Proven | None, error: Exception | None) -> None:
            if proven is None:
                failed(self._explain(error))
                return
            self._channel = Channel(
                self._loop,
                self._sock,
                proven,
                lambda report: self._on_report(self, report),
                lambda reason: self._ended(self, reason),
                codec=agent_messages,
            )
            done()

        self._loop.spawn(self._greet(), deadline, finish)

    def send(self, order: Any) -> None:
        """Sends a message to the agent."""
        if self._channel is not None:
            self._channel.send(order)

    @property
    def backlog(self) -> int:
        """The number of bytes that wait to be sent, because the agent does not read them."""
        return self._channel.backlog if self._channel is not None else 0

    def when_drained(self, act: Callable[[], None]) -> None:
        """Calls `act` when all queued bytes have been sent."""
        if self._channel is not None:
            self._channel.when_drained(act)

    def last_words(self) -> str:
        """The last line of error output of ssh or the agent, in parentheses; "" if there is none."""
        lines = self._error_output.decode(errors="replace").strip().splitlines()
        return f" ({lines[-1]})" if lines else ""

    @property
    def over(self) -> bool:
        """Whether the process of the agent or of ssh has ended, so that `close` does not wait."""
        return bool(self._process.poll() is not None)

    def cut(self) -> None:
        """Ends the connection; the agent then kills everything on its host. Safe from any thread."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(2)

    def close(self) -> bool:
        """Ends the connection and waits until the agent has killed everything on its host; False if that is unknown.

        Blocks the loop.
        """
        self.cut()
        if self._channel is not None:
            self._channel.close()
        if self._stderr >= 0:
            self._loop.forget(self._stderr)
        self._sock.close()
        # An agent that has not authenticated has started nothing, and cannot authenticate after the socket is closed.
        nothing_left = self._channel is None
        try:
            self._process.wait(UNAUTHENTICATED_END_SECONDS if nothing_left else END_SECONDS)
            nothing_left = True
        except Exception:  # subprocess.TimeoutExpired; only spawn.py may import subprocess
            self._process.kill()
            self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()
        return nothing_left

    def _read_errors(self) -> None:
        if self._stderr < 0:
            return
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._stderr, 4096)
            if not data:
                self._loop.forget(self._stderr)
            self._error_output = (self._error_output + data)[-MAX_ERROR_BYTES:]

    def _greet(self) -> Flow[Proven]:
        version = yield from self._read_introduction()
        if version != package_version():
            raise StartError(
                f"{self.name} has farandole {version}, this host {package_version()}: "
                "install the same version on every host",
                topic="other-version",
            )
        if isinstance(self._connector, ssh.SshOptions):  # agents of a bridge know the secret already
            yield from send(self._sock, self._secret.key)
        return (yield from call(self._sock, self._secret, Greeting(Role.LAUNCHER, 0, NOBODY), Role.AGENT))

    def _read_introduction(self) -> Flow[str]:
        seen = b"\n"
        while not (MARK in seen and seen.endswith(b"\n")):
            try:
                data = self._sock.recv(4096)
            except (BlockingIOError, InterruptedError):
                yield Wait(self._sock, READ)
                continue
            if not data or len(seen) > MAX_BANNER_BYTES:
                raise EOFError
            seen += data
        version, _, directory = seen.rpartition(MARK)[2].decode(errors="replace").strip().partition(" ")
        self.directory = directory
        return version

    def _explain(self, error: Exception | None) -> StartError:
        if isinstance(error, StartError):
            return error
        with contextlib.suppress(Exception):  # the exit code and the last error output come a little later
            self._process.wait(0.5)
        self._read_errors()
        error_output = self._error_output.decode(errors="replace").strip()
        if isinstance(error, TimeoutError):
            return StartError(
                f"{self.name} did not answer in time; is it up? Raise --start-timeout if it is only slow."
                + (f" ssh printed: {error_output.splitlines()[-1]}" if error_output else ""),
                topic="no-answer",
            )
        if isinstance(error, Refused | VersionMismatch):
            return StartError(f"the agent on {self.name}: {error}", topic="no-agent")
        if self.host:
            return StartError(
                self._connector.explain(self.host, self._process.returncode, error_output), topic="no-agent"
            )
        return StartError(
            f"the agent on this host ended before it began: {error_output or self._process.returncode}",
            topic="no-agent",
        )


class Pump:
    """Sends calls to one rank in pieces, as fast as the rank and its agent read them."""

    def __init__(self, connection: AgentConnection) -> None:
        self._connection = connection
        self._calls: collections.deque[Iterator[agent_messages.Call]] = collections.deque()
        self._credit = WINDOW
        self._waiting = False  # until the connection has sent its queued bytes

    def add(self, pieces: Iterator[agent_messages.Call]) -> None:
        """Queues a call behind those that were added before."""
        self._calls.append(pieces)
        self._send_pieces()

    def taken(self) -> None:
        """Notes that the rank has read a piece."""
        self._credit += 1
        self._send_pieces()

    def _drained(self) -> None:
        self._waiting = False
        self._send_pieces()

    def _send_pieces(self) -> None:
        while self._calls and self._credit and not self._waiting:
            if self._connection.backlog > MAX_UNSENT_BYTES:
                self._waiting = True
                self._connection.when_drained(self._drained)
            elif (piece := next(self._calls[0], None)) is not None:
                self._credit -= 1
                self._connection.send(piece)
            else:
                self._calls.popleft()


def package_place() -> str:
    """The directory that must be in `sys.path` for `import farandole`."""
    return str(Path(__file__).resolve().parents[2])


def _local_command() -> Sequence[str]:
    # -S and -E: the agent needs no site packages and no PYTHON* variables, and starts twice as fast.
    start = f"import sys; sys.path.insert(0, {package_place()!r}); from farandole.launch.agent import main; main()"
    return [sys.executable, "-S", "-E", "-c", start]


def deadline_after(seconds: float) -> float:
    """The deadline for `AgentConnection.open` that is this many seconds from now."""
    return time.monotonic() + seconds
