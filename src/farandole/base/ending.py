# How a rank reports at its end to its agent: the root cause of its failure, that it never joined, or its facts.
# Touches the descriptor that the agent gave to the rank.
"""At the end of the process, `report(fd)` writes one line of JSON about the exception that ended it."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
from typing import Any

from farandole.base.errors import HorovodInternalError, Mismatch

LONGEST_TEXT = 1000  # characters; a pipe takes a line of this length in one write
LONGEST_PLACE = 300


def report(fd: int, at: str = "") -> None:
    """Writes the uncaught exception that ended this process; without one it writes nothing. `at`: the user's line."""
    error = getattr(sys, "last_value", None)  # set by the interpreter, whatever hooks users have installed
    if isinstance(error, BaseException):
        text = f"{type(error).__name__}: {error}"[:LONGEST_TEXT]
        _write(fd, {"error": text, "blames": blames(error), "at": at[-LONGEST_PLACE:]})


def report_facts(fd: int, lived: float, waited: float) -> None:
    """Writes how long this process was a member of the job, how long it waited for others, and its largest memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _write(fd, {"peak_kb": peak, "lived": lived, "waited": waited})


def report_alone(fd: int, framework: str) -> None:
    """Writes that this process trained with `framework` and never joined the other ranks."""
    _write(fd, {"alone": framework})


def is_pipe(fd: int, number: int) -> bool:
    """Whether `fd` is the pipe of this number. A child of a rank has the rank's variables, but not its files."""
    with contextlib.suppress(OSError):
        return os.fstat(fd).st_ino == number
    return False


def _write(fd: int, line: dict[str, Any]) -> None:
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
