# A bar on a terminal, or a line now and then in a log, while something takes long.
# Touches a stream and a thread; uses only the standard library, because scripts use it before anything is installed.
"""`with Progress("check", state): ...`; `state()` returns the share that is done (None: unknown) and a few words."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

State = Callable[[], "tuple[float | None, str]"]  # a string: an old Python shall come to the text that it is too old
TERMINAL_SECONDS = 0.5  # between two drawings
LOG_SECONDS = 30.0  # between two lines of a log
WIDTH = 24  # of the bar, in characters


def bar(share: float | None, seconds: float) -> str:
    """The bar; without a share a mark that moves with the time.

    >>> bar(0.5, 3.0)
    '[############............]  50 %'
    >>> bar(None, 3.0)
    '[.......###..............]'
    """
    if share is None:
        places = WIDTH - 2
        at = int(seconds * 2.5) % (2 * places - 2)
        at = min(at, 2 * places - 2 - at)
        return f"[{'.' * at}###{'.' * (WIDTH - 3 - at)}]"
    full = int(min(1.0, max(0.0, share)) * WIDTH)
    return f"[{'#' * full}{'.' * (WIDTH - full)}] {min(1.0, share):4.0%}".replace("%", " %")


class Progress:
    """Shows how far something is, until the end of the `with` statement."""

    def __init__(
        self, title: str, state: State, stream: TextIO | None = None, log_seconds: float = LOG_SECONDS
    ) -> None:
        self._title, self._state = title, state
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._every = TERMINAL_SECONDS if self._terminal else log_seconds
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="farandole-progress", daemon=True)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._clear()

    def say(self, line: str) -> None:
        """Prints a line above the bar."""
        with self._lock:
            self._clear()
            print(line, file=self._stream, flush=True)

    def _tick(self) -> None:
        while not self._over.wait(self._every):
            with self._lock:
                self._draw()

    def _draw(self) -> None:
        share, words = self._state()
        seconds = time.monotonic() - self._began
        if not self._terminal:
            done = "" if share is None else f"{min(1.0, share):.0%}, ".replace("%", " %")
            print(f"{self._title}: {done}{seconds:.0f} s{', ' + words if words else ''}", file=self._stream, flush=True)
            return
        text = f"{self._title} {bar(share, seconds)} {seconds:4.0f} s  {words}"
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns or 80
        except OSError:
            columns = 80
        self._stream.write(f"\r\x1b[K{text[: max(1, columns - 1)]}")
        self._stream.flush()

    def _clear(self) -> None:
        if self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
