# The output of ranks: as whole lines with the number of the rank, in files, as last lines, or unchanged.
# Touches the streams and files it is given.
"""Sinks for the output of all ranks of a job. Each sink gets every byte; a job may have several sinks."""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import re
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

LONGEST_LINE = 64 << 10  # longer lines are split, so that a rank that prints no line ends does not fill the memory
STREAMS = ("stdout", "stderr")
TAIL_LINES = 60  # the number of lines that are kept of each stream of each rank, to show when it fails
LONGEST_TAIL_LINE = 500
COLOURS = (36, 33, 35, 32, 34, 91, 96, 93)  # the colour of the prefix of each line, by rank


class Sink(Protocol):
    """Takes the output of ranks; empty data is the end of a stream."""

    def feed(self, rank: int, stream: int, data: bytes) -> None:
        """Bytes of one stream of one rank."""
        ...


class Target(Protocol):
    """What bytes are written to: a binary file, or a screen."""

    def write(self, data: bytes, /) -> int:
        """Writes all of the data."""
        ...

    def flush(self) -> None:
        """Writes what is in the buffer."""
        ...


T = TypeVar("T")


class _PerRank(dict[int, T]):
    """An entry for each rank. An elastic job may start more workers later: their entries are made at the first use."""

    def __init__(self, size: int, make: Callable[[], T]) -> None:
        super().__init__((rank, make()) for rank in range(size))
        self._make = make

    def __missing__(self, rank: int) -> T:
        return self.setdefault(rank, self._make())


def _tail() -> collections.deque[bytes]:
    return collections.deque(maxlen=TAIL_LINES)


class Lines:
    """Splits the bytes of one stream into whole lines, without their line ends."""

    def __init__(self) -> None:
        self._begun = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that are complete now. At the end of the stream (no data) also the last line, if incomplete."""
        *lines, self._begun = (self._begun + data).split(b"\n")
        if self._begun and (not data or len(self._begun) > LONGEST_LINE):
            lines.append(self._begun)
            self._begun = b""
        return lines


class PrefixedLines:
    """Writes whole lines to this process's streams, each with the prefix `[rank]<stream>:`, as Horovod does.

    `colours` and `clock` (which returns a time as text) change the prefix. `around(write)` calls `write` and may do
    something before and after it, as a status line does.
    """

    def __init__(
        self,
        size: int,
        targets: Sequence[Target],
        colours: Sequence[bool] = (False, False),
        clock: Callable[[], str] = lambda: "",
        around: Callable[[Callable[[], None]], None] = lambda write: write(),
        name: Callable[[int], int] = lambda rank: rank,
    ) -> None:
        self._targets = targets
        self._colours = colours
        self._clock = clock
        self._around = around
        self._name = name  # gives the number in the prefix; for a worker of an elastic job its current rank
        self._lines = _PerRank(size, lambda: (Lines(), Lines()))

    def feed(self, rank: int, stream: int, data: bytes) -> None:
        """Writes the lines that are complete now."""
        lines = self._lines[rank][stream].feed(data)
        if not lines:
            return
        rank = self._name(rank)
        prefix = f"{self._clock()}[{rank}]<{STREAMS[stream]}>:"
        if self._colours[stream]:
            prefix = f"\x1b[{COLOURS[rank % len(COLOURS)]}m{prefix}\x1b[0m"
        text = b"".join(prefix.encode() + line + b"\n" for line in lines)

        def write() -> None:
            self._targets[stream].write(text)
            self._targets[stream].flush()

        self._around(write)


class Raw:
    """Writes all bytes unchanged."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = targets

    def feed(self, rank: int, stream: int, data: bytes) -> None:
        """Writes the data."""
        self._targets[stream].write(data)
        self._targets[stream].flush()


class MemorySink:
    """Keeps the output of each rank in memory."""

    def __init__(self, size: int) -> None:
        self._data = _PerRank(size, lambda: (bytearray(), bytearray()))

    def feed(self, rank: int, stream: int, data: bytes) -> None:
        """Adds the data."""
        self._data[rank][stream].extend(data)

    def text(self, rank: int, stream: int) -> str:
        """All output of one stream so far."""
        return bytes(self._data[rank][stream]).decode(errors="replace")


class Files:
    """Writes `directory/rank.N/stdout` and `stderr`. N has leading zeros, so that the names sort."""

    def __init__(self, directory: str | Path, size: int) -> None:
        self._directory = Path(directory)
        self._width = len(str(size - 1))
        self._files: dict[int, tuple[BinaryIO, BinaryIO]] = {}
        try:
            for rank in range(size):
                self._open(rank)
        except OSError:
            self.close()
            raise

    def _open(self, rank: int) -> tuple[BinaryIO, BinaryIO]:
        path = self._directory / f"rank.{rank:0{self._width}d}"
        path.mkdir(parents=True, exist_ok=True)
        # Unbuffered, so that the last output of a rank is in the file even if this process is killed.
        out, err = (open(path / name, "wb", buffering=0) for name in STREAMS)  # noqa: SIM115
        self._files[rank] = (out, err)
        return out, err

    def feed(self, rank: int, stream: int, data: bytes) -> None:
        """Writes all of the data, or raises OSError."""
        file = (self._files.get(rank) or self._open(rank))[stream]
        while data:
            data = data[file.write(data) :]

    def close(self) -> None:
        """Closes every file."""
        for pair in self._files.values():
            for file in pair:
                file.close()


class Tails:
    """The last lines of each stream of each rank."""

    def __init__(self, size: int) -> None:
        self._lines = _PerRank(size, lambda: (Lines(), Lines()))
        self._tails = _PerRank(size, lambda: (_tail(), _tail()))

    def feed(self, rank: int, stream: int, data: bytes) -> None:
        """Keeps the lines that are complete now."""
        for line in self._lines[rank][stream].feed(data):
            self._tails[rank][stream].append(line[:LONGEST_TAIL_LINE])

    def last_words(self, rank: int, count: int = 20) -> list[str]:
        """What a rank printed before it failed: its last traceback, or its last lines."""
        for stream in (1, 0):
            lines = [line.decode(errors="replace") for line in self._tails[rank][stream]]
            starts = [index for index, line in enumerate(lines) if line.startswith("Traceback (most recent")]
            if starts:
                return lines[starts[-1] :]
            if lines:
                return lines[-count:]
        return []


def is_error(line: str) -> bool:
    """Whether a line names an exception, as at the end of a traceback.

    >>> is_error("SyntaxError: '(' was never closed"), is_error("no config.json")
    (True, False)
    """
    return re.match(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)(:|$)", line) is not None


def last_line(trace: Sequence[str]) -> str:
    """The line of a traceback that names the exception.

    >>> last_line(["Traceback (most recent call last):", '  File "a.py", line 1, in <module>', "ValueError: x", ""])
    'ValueError: x'
    """
    named = [line for line in trace[1:] if line and line[0].isalpha()]
    return named[-1] if named else trace[-1]


class Tee:
    """Passes the output to several sinks."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks

    def feed(self, rank: int, stream: int, data: bytes) -> None:
        """Passes the data to each of them."""
        for sink in self._sinks:
            sink.feed(rank, stream, data)


class Writer:
    """Writes on a thread of its own. If nobody reads the output, only the ranks that print have to wait."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="farandole-output", daemon=True)
        self._thread.start()

    def add(self, act: Callable[[], None]) -> None:
        """Calls `act` soon on the writer's thread. The caller limits how much waits there."""
        self._queue.put(act)

    def close(self, seconds: float) -> None:
        """Does what is left, for at most `seconds`."""
        self._queue.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while (act := self._queue.get()) is not None:
            # The terminal may be gone. Callers that must know of errors catch them in `act` themselves.
            with contextlib.suppress(OSError):
                act()


class Screen:
    """One of this process's own streams, without a buffer.

    A blocked thread would hold the lock of a buffered stream, and this process could then not exit.
    """

    def __init__(self, number: int) -> None:
        self._number = number

    def write(self, data: bytes) -> int:
        """Writes all of the data."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._number, view) :]
        return len(data)

    def write_within(self, seconds: float, data: bytes) -> None:
        """Writes as much of the data as somebody reads within `seconds`."""
        deadline = time.monotonic() + seconds
        for start in range(0, len(data), select.PIPE_BUF):  # a pipe that is ready takes at least this much
            if not select.select([], [self._number], [], max(0.0, deadline - time.monotonic()))[1]:
                return
            self.write(data[start : start + select.PIPE_BUF])

    def flush(self) -> None:
        """Does nothing: there is no buffer."""

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return os.isatty(self._number)

    def fileno(self) -> int:
        """Its file descriptor."""
        return self._number


def screens() -> tuple[Screen, Screen]:
    """This process's standard output and error. What it has printed before is written first."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    return Screen(1), Screen(2)


class StatusLine:
    """A line at the bottom of a terminal that shows how many ranks run, and for how long."""

    def __init__(self, terminal: Screen, words: Callable[[], str]) -> None:
        self._terminal = terminal
        self._words = words
        self._began = time.monotonic()
        self._shown = False

    def around(self, write: Callable[[], None]) -> None:
        """Removes the line while something else is written."""
        self.hide()
        write()
        self.show()

    def show(self) -> None:
        """Shows the line."""
        width = os.get_terminal_size(self._terminal.fileno()).columns if self._terminal.isatty() else 80
        seconds = int(time.monotonic() - self._began)
        text = f"{self._words()}  {seconds // 60:d}:{seconds % 60:02d}"[: width - 1]
        self._terminal.write(f"\r\x1b[K\x1b[2m{text}\x1b[0m".encode())
        self._terminal.flush()
        self._shown = True

    def hide(self) -> None:
        """Removes the line."""
        if self._shown:
            self._terminal.write(b"\r\x1b[K")
            self._terminal.flush()
            self._shown = False


def time_of_day() -> str:
    """The time that --timestamps puts before each line."""
    now = time.time()
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))}.{int(now % 1 * 1000):03d} "
