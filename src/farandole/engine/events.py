# The thread that takes the core's events: lines for the log, and links that the core needs.
# Touches the extension's engine, whose events it takes.
"""No Python runs on the core's own thread, so this one waits for its events."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

_LINK_WANTED = 1
_LOG_LINE = 2
_END_SECONDS = 10.0  # for a link request in progress

_log = logging.getLogger("farandole")

Event = tuple[int, int, int, str]  # kind, peer, level of the log, text


class EventThread:
    """Calls `next_event` until it gives None, which it does when the engine has stopped."""

    def __init__(self) -> None:
        self._wanted: Callable[[int], None] | None = None
        self._unanswered: list[int] = []  # peers of link requests that came before watch_links()
        self._thread: threading.Thread | None = None

    def start(self, next_event: Callable[[], Event | None], name: str) -> None:
        """Starts the thread."""
        self._thread = threading.Thread(target=self._run, args=(next_event,), name=name, daemon=True)
        self._thread.start()

    def watch_links(self, wanted: Callable[[int], None]) -> None:
        """From now on `wanted(peer)` is called when a link is needed; at once for earlier requests."""
        self._wanted = wanted
        with contextlib.suppress(IndexError):  # the last one is taken
            while True:
                wanted(self._unanswered.pop())

    def join(self) -> bool:
        """Waits for the end of the thread; False if it is still busy."""
        thread = self._thread
        if thread is None:
            return True
        thread.join(_END_SECONDS)
        if thread.is_alive():
            return False
        self._thread = None
        return True

    def _run(self, next_event: Callable[[], Event | None]) -> None:
        while (event := next_event()) is not None:
            try:
                self._handle(*event)
            except Exception:  # one failed event must not stop the later ones
                _log.exception("an event of the engine could not be handled")

    def _handle(self, kind: int, peer: int, level: int, text: str) -> None:
        if kind == _LOG_LINE:
            _log.log(level, "%s", text)
        elif kind == _LINK_WANTED:
            self._unanswered.append(peer)
            if self._wanted is not None:
                self.watch_links(self._wanted)
