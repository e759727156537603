# Signals that come in the middle of a test.
# Touches SIGALRM, its timer and its handler.
"""`alarm` calls a function from a signal handler; `interrupted` expects that one ends its block with an exception."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator

import pytest


class Interrupted(Exception):
    """What a signal handler raised."""


@contextlib.contextmanager
def alarm(handler: Callable[[], object], seconds: float, again: float = 0.0) -> Iterator[None]:
    """Calls `handler` after so many seconds; then every `again` seconds, if that is not 0."""
    before = signal.signal(signal.SIGALRM, lambda _number, _frame: handler())
    signal.setitimer(signal.ITIMER_REAL, seconds, again)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def interrupted(seconds: float) -> Iterator[None]:
    """A signal handler must end the block with an exception after so many seconds."""

    def handler() -> None:
        raise Interrupted

    with alarm(handler, seconds), pytest.raises(Interrupted):
        yield
