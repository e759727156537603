# What a rank of `farandole check` has seen of its script.
# Touches the audit hook, a timer, the runtime's open; writes one file.
"""`Report.found` becomes a file of JSON; the watches of the frameworks add to it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from farandole.base import tested, tracebacks
from farandole.base.config import Config
from farandole.engine.interface import Engine
from farandole.tools.check import lines
from farandole.world.runtime import runtime

# Files of these names are caches and devices, which no script means to write.
NO_RESULTS = ("/dev/", "/proc/", "/sys/", "__pycache__", "/.cache/", "/.triton/", "torchinductor", ".lock")
MANY_FILES = 200
WHOLE_PASSES = 2  # through the data in one line; later ones have one batch, so that the end of the script comes soon


def steps_file(folder: Path, rank: int) -> Path:
    """The file that has a byte for each step of a rank."""
    return folder / f"steps.{rank}"


class Enough(BaseException):
    """All steps are done. No Exception: no handler of the script may catch it."""


class Report:
    """What this rank has seen, and when it ends."""

    def __init__(self, folder: Path, steps: int, names: set[str]) -> None:
        self.folder = folder
        self.steps = steps  # of a pass through the data; the script ends after some steps more
        self.names = names  # what the script imports
        config = Config.from_environment()
        self.rank, self.size = config.rank, config.size
        self.closing: list[Callable[[], None]] = []  # called before the report is written
        self.found: dict[str, Any] = {"rank": self.rank, "files": {}, "ended": "late", "error": "", "line": ""}
        self.engine: Engine | None = None
        self._collectives = 0  # when the engine was closed
        self._half = math.inf
        self._main = threading.get_ident()
        self._lock = threading.Lock()
        self._written = False
        self._progress: int | None = None  # a file whose length is the number of steps, for the one who waits

    @property
    def collectives(self) -> int:
        """How many collectives this rank has run."""
        if self.engine is not None:
            self._collectives = self.engine.counter("collectives")
        return self._collectives

    def stepped(self) -> None:
        """The optimizer has made a step."""
        if self._progress is None:
            self._progress = os.open(steps_file(self.folder, self.rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.write(self._progress, b".")

    def watch_init(self) -> None:
        """Notes the first init(), and keeps the engine."""
        opened, closed = runtime.open, runtime.close

        def close() -> None:
            self._collectives, self.engine = self.collectives, None
            closed()

        def open_(*args: Any, **kwargs: Any) -> None:
            opened(*args, **kwargs)
            self.engine = runtime.world.engine
            self.found.setdefault("init", lines.here())

        runtime.open, runtime.close = open_, close  # type: ignore[method-assign]

    def watch_files(self) -> None:
        """Notes which files the script opens to write."""

        def opened(event: str, arguments: tuple[Any, ...]) -> None:
            if event != "open" or len(arguments) < 3 or not isinstance(arguments[0], str | bytes | os.PathLike):
                return
            flags = arguments[2] if isinstance(arguments[2], int) else 0
            if flags & (os.O_WRONLY | os.O_RDWR):
                self.wrote(os.fsdecode(arguments[0]))

        sys.addaudithook(opened)

    def wrote(self, path: str) -> None:
        """A file was written."""
        path, files = os.path.abspath(path), self.found["files"]
        apart = path.startswith(str(self.folder)) or any(part in path for part in NO_RESULTS)
        apart = apart or os.path.isdir(path)  # O_TMPFILE: a file without a name
        if not self._written and not apart and len(files) < MANY_FILES and path not in files:
            files[path] = lines.here()

    @property
    def half_over(self) -> bool:
        """Whether half of the time is over: only the steps that are needed are made then."""
        return time.monotonic() > self._half

    def end_after(self, seconds: float) -> None:
        """A thread writes the report and ends the process if the script takes longer."""
        self._half = time.monotonic() + seconds / 2

        def late() -> None:
            frame = sys._current_frames().get(self._main)
            stack = traceback.extract_stack(frame)
            mine = [one for one in stack if not tracebacks.is_library(one.filename)]
            if mine:
                self.found["line"] = f"{tracebacks.shown(mine[-1].filename)}:{mine[-1].lineno}"
            self.write()
            os._exit(0)

        timer = threading.Timer(seconds, late)
        timer.daemon = True
        timer.start()

    def write(self) -> None:
        """Writes the report, once."""
        with self._lock:
            if not self._written:
                for close in self.closing:
                    with contextlib.suppress(Exception):  # a part of the report is better than none
                        close()
                self._written = True
                self.found["frameworks"] = tested.used()
                self.found["collectives"] = self.collectives
                draft = self.folder / f"draft.{self.rank}"
                draft.write_text(json.dumps(self.found))
                draft.rename(self.folder / f"rank.{self.rank}.json")
