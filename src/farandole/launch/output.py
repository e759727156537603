# What the ranks print: whole lines, marked with their rank, or kept for whoever started them.
# Touches the streams it is given.
"""Lines of several ranks on one screen."""

from __future__ import annotations

from typing import BinaryIO

LONGEST_LINE = 64 << 10  # longer ones are cut, so that a rank without line ends fills no memory


class Marked:
    """Writes complete lines of one stream of one rank, each with `[rank]<stream>:` in front, as Horovod does."""

    def __init__(self, rank: int, stream: str, target: BinaryIO) -> None:
        self._mark = f"[{rank}]<{stream}>:".encode()
        self._target = target
        self._begun = b""

    def feed(self, data: bytes) -> None:
        """Takes bytes; empty ones mean the end of the stream."""
        *lines, self._begun = (self._begun + data).split(b"\n")
        if self._begun and (not data or len(self._begun) > LONGEST_LINE):
            lines.append(self._begun)
            self._begun = b""
        if lines:
            self._target.write(b"".join(self._mark + line + b"\n" for line in lines))
            self._target.flush()


class Kept:
    """Keeps what one stream of one rank printed."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """Takes bytes."""
        self._data += data

    def text(self) -> str:
        """All of it so far."""
        return bytes(self._data).decode(errors="replace")
