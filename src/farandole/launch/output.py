# What the ranks print: whole lines, marked with their rank; or kept for whoever started them; or as it comes.
# Touches the streams and files it is given.
"""Sinks for the output of all ranks of a job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import BinaryIO, Protocol

LONGEST_LINE = 64 << 10  # longer ones are cut, so that a rank without line ends fills no memory
STREAMS = ("stdout", "stderr")
TAIL_LINES = 60


class Sink(Protocol):
    """Takes what ranks print; empty data is the end of a stream."""

    def feed(self, rank: int, stream: int, data: bytes) -> None:
        """Bytes of one stream of one rank."""
        ...


class Lines:
    """Cuts the bytes of one stream into whole lines, without their ends."""

    def __init__(self) -> None:
        self._begun = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that are complete now; at the end (no data) the last one, complete or not."""
        *lines, self._begun = (self._begun + data).split(b"\n")
        if self._begun and (not data or len(self._begun) > LONGEST_LINE):
            lines.append(self._begun)
            self._begun = b""
        return lines


class Marked:
    """Writes whole lines to our own streams, each with `[rank]<stream>:` in front, as Horovod does."""

    def __init__(self, size: int, targets: Sequence[BinaryIO]) -> None:
        self._targets = targets
        self._lines = [(Lines(), Lines()) for _ in range(size)]

    def feed(self, rank: int, stream: int, data: bytes) -> None:
        """Writes what has become whole."""
        lines = self._lines[rank][stream].feed(data)
        if lines:
            mark = f"[{rank}]<{STREAMS[stream]}>:".encode()
            self._targets[stream].write(b"".join(mark + line + b"\n" for line in lines))
            self._targets[stream].flush()


class Raw:
    """Writes what comes as it comes."""

    def __init__(self, targets: Sequence[BinaryIO]) -> None:
        self._targets = targets

    def feed(self, rank: int, stream: int, data: bytes) -> None:
        """Writes it."""
        self._targets[stream].write(data)
        self._targets[stream].flush()


class Kept:
    """Keeps what each rank printed."""

    def __init__(self, size: int) -> None:
        self._data = [(bytearray(), bytearray()) for _ in range(size)]

    def feed(self, rank: int, stream: int, data: bytes) -> None:
        """Adds it."""
        self._data[rank][stream].extend(data)

    def text(self, rank: int, stream: int) -> str:
        """All of it so far."""
        return bytes(self._data[rank][stream]).decode(errors="replace")
