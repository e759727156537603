# horovod.runner.util.streams: a pipe inside one process.
# Touches nothing.
"""The reader waits for the writer."""

from __future__ import annotations

import threading


class Pipe:
    """One thread writes, another thread reads. A write waits until the last data has been read."""

    def __init__(self) -> None:
        self._buffer: str | bytes | None = None
        self._closed = False
        self._changed = threading.Condition()

    def write(self, buf: str | bytes) -> int:
        """Writes data for the reader; RuntimeError when the pipe is closed."""
        with self._changed:
            while self._buffer is not None and not self._closed:
                self._changed.wait()
            if self._closed:
                raise RuntimeError("Pipe is closed")
            self._buffer = buf
            self._changed.notify_all()
            return len(buf)

    def read(self, length: int = -1) -> str | bytes | None:
        """Returns written data, at most `length`; None when the pipe is closed and all data has been read."""
        with self._changed:
            while self._buffer is None and not self._closed:
                self._changed.wait()
            if self._buffer is None:
                return None
            found, left = self._buffer, None
            if 0 < length < len(found):
                found, left = found[:length], found[length:]
            self._buffer = left
            self._changed.notify_all()
            return found

    def flush(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Closes the pipe. The reader gets the remaining data, then None."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
