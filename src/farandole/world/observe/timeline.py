# The timeline: pulls trace events from the engine and keeps a Chrome trace file that is valid JSON at any time.
# Touches engine.
"""A thread writes the events twenty times per second; it exists only while a trace is recorded."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from farandole.base.errors import HorovodInternalError
from farandole.engine.interface import Engine

PERIOD_S = 0.05
_END = b"\n]\n"

_log = logging.getLogger("farandole")


class TraceFile:
    """A JSON array of events that grows; each write moves its closing bracket.

    Scripts call start_timeline with one path on all ranks of a host. Rank 0 then writes the file, as in Horovod: it
    holds a shared lock on it. The others (`first=False`) lock it for each write, and stop if it is no longer theirs.
    """

    def __init__(self, path: str | os.PathLike[str], first: bool = True) -> None:
        self.path = Path(path)
        self._first = first
        self._lost = False  # another process writes the file
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._end: int | None = None  # the offset of the closing bracket
        self._empty = True
        if first:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(self._descriptor, fcntl.LOCK_SH)
        self._write(b"[")

    def append(self, lines: bytes) -> None:
        """Adds events, one JSON object per line."""
        events = [line for line in lines.splitlines() if line]
        if events:
            start = b"\n" if self._empty else b",\n"
            self._empty = False
            self._write(start + b",\n".join(events))

    def close(self) -> None:
        os.close(self._descriptor)

    def _write(self, text: bytes) -> None:
        with self._locked():
            if self._lost:
                return
            if self._end is None:
                with contextlib.suppress(OSError):  # a device, such as /dev/null
                    os.ftruncate(self._descriptor, 0)
                self._end = 0
            self._replace_end(text, self._end)
            self._end += len(text)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Finds out whether another process writes the file. During the block no other process begins to."""
        if self._first or self._lost:
            yield
            return
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lost = True
        except OSError:
            pass  # a file system without locks
        if self._end is not None and os.fstat(self._descriptor).st_size != self._end + len(_END):
            self._lost = True
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _replace_end(self, text: bytes, end: int) -> None:
        # One write replaces the old bracket with the new text and bracket, so a reader never sees half of it.
        left = memoryview(text + _END)
        offset = end
        try:
            while left:
                written = os.pwrite(self._descriptor, left, offset)
                left, offset = left[written:], offset + written
        except OSError:
            # The disk is full: the earlier content stays readable.
            os.ftruncate(self._descriptor, end)
            os.pwrite(self._descriptor, _END, end)
            raise


class Timeline:
    """Writes the trace of one engine to a file from construction to stop()."""

    def __init__(self, engine: Engine, path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
        self._engine = engine
        self._file = TraceFile(path, first=engine.rank == 0)
        self._stopped = threading.Event()
        try:
            engine.trace(True, mark_cycles)
        except Exception:
            self._file.close()
            raise
        self._thread = threading.Thread(target=self._run, name=f"farandole-timeline-{engine.rank}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Writes what is left and closes the file. Calling it again does nothing."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._thread.join()
        try:
            # Twice: an engine may drop events when tracing is switched off, or write a last event after it.
            self._file.append(self._engine.trace_drain())
            self._engine.trace(False)
            self._file.append(self._engine.trace_drain())
        except (OSError, HorovodInternalError) as error:
            _log.warning("the end of the timeline %s is missing: %s", self._file.path, error)
        finally:
            self._file.close()

    def _run(self) -> None:
        while not self._stopped.wait(PERIOD_S):
            try:
                self._file.append(self._engine.trace_drain())
            except (OSError, HorovodInternalError) as error:
                _log.warning("the timeline %s ends here: %s", self._file.path, error)
                return
