# The timeline: pulls trace events from the engine and keeps a Chrome trace file that is valid JSON at any time.
# Touches engine.
"""A thread writes the events twenty times per second; it exists only while a trace is recorded."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from farandole.base.errors import HorovodInternalError
from farandole.engine.interface import Engine

PERIOD_S = 0.05
_END = b"\n]\n"

_log = logging.getLogger("farandole")


class TraceFile:
    """A JSON array of events that grows; each write moves its closing bracket."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._end = 0  # the position of the closing bracket
        self._empty = True
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
        # One write replaces the old bracket with the new text and bracket, so a reader never sees half of it.
        left = memoryview(text + _END)
        place = self._end
        try:
            while left:
                written = os.pwrite(self._descriptor, left, place)
                left, place = left[written:], place + written
        except OSError:
            # The disk is full: the earlier content stays readable.
            os.ftruncate(self._descriptor, self._end)
            os.pwrite(self._descriptor, _END, self._end)
            raise
        self._end += len(text)


class Timeline:
    """Writes the trace of one engine to a file from construction to stop()."""

    def __init__(self, engine: Engine, path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
        self._engine = engine
        self._file = TraceFile(path)
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
