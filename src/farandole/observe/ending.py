# How a rank that fails tells its agent whether it fell with another.
# Touches the descriptor that the agent gave it.
"""`tell(fd)` at the end of the process: one line of JSON about the exception that ended it, if one did."""

from __future__ import annotations

import contextlib
import json
import os
import sys

from farandole.errors import HorovodInternalError, Mismatch

LONGEST_TEXT = 1000  # the whole line must fit into a pipe in one piece


def tell(fd: int) -> None:
    """Writes what ended this process: an exception nobody caught. Nothing when it ends in another way."""
    error = getattr(sys, "last_value", None)  # set by the interpreter, whatever hooks users have installed
    if not isinstance(error, BaseException):
        return
    line = {"error": f"{type(error).__name__}: {error}"[:LONGEST_TEXT], "blames": blames(error)}
    with contextlib.suppress(OSError):
        os.write(fd, json.dumps(line).encode() + b"\n")


def blames(error: BaseException | None) -> int | None:
    """The rank whose end caused this error, -1 when it is not known which; None: nobody but this rank itself."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, HorovodInternalError) and not isinstance(error, Mismatch):
            return int(getattr(error, "rank", -1))
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None
