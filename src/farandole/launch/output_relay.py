# Writes the output that agents report, and tells the agents how much of it is written.
# Touches a sink, on the thread of Writer; the rest runs in the loop.
"""`OutputRelay(loop, sink, failed)`: ranks may print only as fast as their output is written."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

from farandole.launch.agent_connection import AgentConnection
from farandole.launch.output import Sink, Writer
from farandole.rendezvous import agent_messages
from farandole.rendezvous.flow import Loop

OUTPUT_SECONDS = 2.0  # how long we wait for somebody to read the output when the job must end
# The agent is told when this much of its output is written. It is far below the limit at which the agent waits.
ACKNOWLEDGE_BYTES = 128 << 10


class OutputRelay:
    """`failed(exit code, reason, topic)` is called, in the loop, when the output cannot be written."""

    def __init__(self, loop: Loop, sink: Sink, failed: Callable[[int, str, str], None]) -> None:
        self.stuck = False  # the last output could not be written, because nobody reads it
        self._loop = loop
        self._sink = sink
        self._failed = failed
        self._writer = Writer()
        self._unwritten = 0  # the number of messages with output that are not written yet
        self._acknowledge: dict[
            AgentConnection, int
        ] = {}  # written bytes of each agent that were not yet reported to it

    def add(self, connection: AgentConnection, report: agent_messages.Output) -> None:
        """Writes what a rank has printed, after what was added before."""

        def write() -> None:
            error: Exception | None = None
            try:
                self._sink.feed(report.rank, report.stream, report.data)
            except Exception as caught:
                error = caught
            self._loop.call(lambda: self._written(connection, report, error))

        self._unwritten += 1
        self._writer.add(write)

    def finish_received(self, seconds: float) -> None:
        """Returns when all output that was received is written, or after `seconds`. Safe from any thread."""
        written = threading.Event()
        self._writer.add(written.set)
        written.wait(seconds)

    def call_when_idle(self, act: Callable[[], None]) -> None:
        """Calls `act` soon on the thread that writes output, unless output waits there. Safe from any thread."""
        self._loop.call(lambda: None if self._unwritten else self._writer.add(act))

    def finish(self, ends_soon: Callable[[], bool], closed: Callable[[], bool]) -> None:
        """Turns the loop until all output is written or the job is closed; only for a short time once `ends_soon()`."""
        deadline: float | None = None
        while self._unwritten and not closed():
            if ends_soon() and deadline is None:
                deadline = time.monotonic() + OUTPUT_SECONDS
            if deadline is not None and time.monotonic() >= deadline:
                self.stuck = True
                return
            self._loop.turn(deadline)

    def close(self) -> None:
        """Ends the thread that writes."""
        self._writer.close(0.0 if self.stuck else OUTPUT_SECONDS)

    def _written(self, connection: AgentConnection, report: agent_messages.Output, error: Exception | None) -> None:
        self._unwritten -= 1
        count = self._acknowledge.pop(connection, 0) + len(report.data)
        if count >= ACKNOWLEDGE_BYTES:
            connection.send(agent_messages.OutputCredit(count))
        else:
            self._acknowledge[connection] = count
        if isinstance(error, BrokenPipeError):  # nobody reads our output any more: end like a program in a pipeline
            self._failed(128 + signal.SIGPIPE, "", "")
        elif error is not None:
            self._failed(1, f"cannot write the output of rank {report.rank}: {error}", "no-output")
