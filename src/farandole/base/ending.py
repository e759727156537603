# How a rank that fails reports to its agent which rank is the root cause.
# Touches the descriptor that the agent gave to the rank.
"""At the end of the process, `report(fd)` writes one line of JSON about the exception that ended it."""

from __future__ import annotations

import contextlib
import json
import os
import sys

from farandole.base.errors import HorovodInternalError, Mismatch

LONGEST_TEXT = 1000  # characters; a pipe takes a line of this length in one write


def report(fd: int) -> None:
    """Writes the uncaught exception that ended this process; without one it writes nothing."""
    error = getattr(sys, "last_value", None)  # set by the interpreter, whatever hooks users have installed
    if not isinstance(error, BaseException):
        return
    line = {"error": f"{type(error).__name__}: {error}"[:LONGEST_TEXT], "blames": blames(error)}
    with contextlib.suppress(OSError):
        os.write(fd, json.dumps(line).encode() + b"\n")


def blames(error: BaseException | None) -> int | None:
    """The rank that caused this error, -1 if it is unknown; None if this rank itself is the cause."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, HorovodInternalError) and not isinstance(error, Mismatch):
            return int(getattr(error, "rank", -1))
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None
