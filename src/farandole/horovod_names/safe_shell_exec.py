# horovod.runner.common.util.safe_shell_exec: runs a command, forwards its output, and ends all its processes.
# Starts processes through launch/spawn.py, and a thread that watches events.
"""`execute("python train.py", env)` returns the exit code."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from farandole.launch import spawn
from farandole.launch.output import time_of_day

GRACEFUL_TERMINATION_TIME_S = 5
CHECK_SECONDS = 0.1  # between two checks of events


def execute(
    command: str | Sequence[str],
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    index: int | None = None,
    events: Sequence[Any] | None = None,
    prefix_output_with_timestamp: bool = False,
) -> int:
    """Runs a shell command. Returns its exit code, or 128 + signal if it was killed.

    When one of `events` is set, the command and all its processes are ended. `index`: each line gets the mark
    `[index]<stdout>:`.
    """
    words = command if isinstance(command, str) else " ".join(command)
    variables = {os.fsencode(name): os.fsencode(text) for name, text in (os.environ if env is None else env).items()}
    worker = spawn.start_worker([b"/bin/sh", b"-c", os.fsencode(words)], variables, b"", ())
    clock = time_of_day if prefix_output_with_timestamp else None
    streams = {
        worker.stdout: _Lines(sys.stdout if stdout is None else stdout, "stdout", index, clock),
        worker.stderr: _Lines(sys.stderr if stderr is None else stderr, "stderr", index, clock),
    }
    kill_at: float | None = None
    try:
        # Processes that it leaves may keep the pipes open forever, so we wait only for the command itself.
        while not spawn.has_ended(worker.pid):
            kill_at = _look_at(events or (), worker, kill_at)
            _pass_on(streams, CHECK_SECONDS)
        _pass_on(streams, 0)
    except BaseException:
        worker.send(signal.SIGKILL, group=True)
        raise
    finally:
        code = worker.reap()
        worker.close()
        for lines in streams.values():
            lines.close()
    return code


def terminate_executor_shell_and_children(pid: int) -> None:
    """Sends SIGTERM to a process and its descendants, and kills what is left after GRACEFUL_TERMINATION_TIME_S."""
    doomed = [pid, *spawn.descendants(pid)]
    for one in doomed:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(one, signal.SIGTERM)
    deadline = time.monotonic() + GRACEFUL_TERMINATION_TIME_S
    while time.monotonic() < deadline and not all(map(spawn.has_ended, doomed)):
        time.sleep(CHECK_SECONDS / 10)
    spawn.kill([one for one in doomed if not spawn.has_ended(one)])


def _look_at(events: Sequence[Any], worker: spawn.Worker, kill_at: float | None) -> float | None:
    """Ends the worker if an event is set. Returns the time at which it must be killed."""
    now = time.monotonic()
    if kill_at is None and any(event.is_set() for event in events):
        worker.send(signal.SIGTERM, group=True)
        return now + GRACEFUL_TERMINATION_TIME_S
    if kill_at is not None and now >= kill_at:
        worker.send(signal.SIGKILL, group=True)
    return kill_at


def _pass_on(streams: dict[int, _Lines], seconds: float) -> None:
    """Forwards what can be read now, and removes pipes that have ended."""
    for pipe in select.select(list(streams), [], [], seconds)[0]:
        while True:
            try:
                data = os.read(pipe, 1 << 16)
            except BlockingIOError:
                break
            if not data:
                streams.pop(pipe).close()
                break
            streams[pipe].feed(data)


class _Lines:
    """Writes whole lines, with a mark if there is an index."""

    def __init__(self, target: Any, name: str, index: int | None, clock: Any) -> None:
        self._target, self._name, self._index, self._clock = target, name, index, clock
        self._rest = b""

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._write(line.decode(errors="replace") + "\n")

    def close(self) -> None:
        if self._rest:
            self._write(self._rest.decode(errors="replace"))
        self._rest = b""

    def _write(self, text: str) -> None:
        mark = f"[{self._index}]<{self._name}>:" if self._index is not None else ""
        self._target.write((self._clock() if self._clock is not None else "") + mark + text)
        self._target.flush()
