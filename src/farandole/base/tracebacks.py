# What is printed about the exception that ends a rank, and which line of the user's script it came from.
# Touches sys.excepthook, and files in the job's private directory that tell ranks of one host why another one ended.
"""`install(config)` shortens tracebacks: frames of this package are left out, and a rank that fails because another one
ended prints no traceback. `note(...)` and `cause_of` tell the ranks of a host which exception that was."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from pathlib import Path
from types import TracebackType

from farandole.base import errors
from farandole.base.config import Config
from farandole.base.ending import blames

OURS = str(Path(__file__).parents[1]) + os.sep
LONGEST_CAUSE = 500  # characters
LEFT_OUT = "(Farandole's own frames are left out; FARANDOLE_TRACEBACKS=full shows them)"


def shown(path: str) -> str:
    """A path as short as possible."""
    with contextlib.suppress(OSError, ValueError):
        relative = os.path.relpath(path)
        return path if relative.startswith("..") else relative
    return path


def is_library(path: str) -> bool:
    """Whether a file belongs to Python, to an installed package, or to us. `<string>` is a script too.

    >>> is_library("<frozen runpy>"), is_library("/home/me/train.py"), is_library("<string>")
    (True, False, False)
    """
    parts = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
    if path in ("<string>", "<stdin>"):
        return False
    return path.startswith((OURS, "<", os.path.dirname(os.__file__) + os.sep)) or any(part in path for part in parts)


def user_line(error: BaseException) -> str:
    """`train.py:41`: the innermost line of the user in a traceback; "" if there is none."""
    lines = [one for one in traceback.extract_tb(error.__traceback__) if not is_library(one.filename)]
    return f"{shown(lines[-1].filename)}:{lines[-1].lineno}" if lines else ""


def described(error: BaseException) -> str:
    """`ValueError: no data (train.py:41)`, in one line."""
    first = f"{type(error).__name__}: {error}".partition("\n")[0].strip()
    where = user_line(error)
    return f"{first[:LONGEST_CAUSE]} ({where})" if where else first[:LONGEST_CAUSE]


def text(error: BaseException) -> str:
    """What a rank prints about the exception that ends it."""
    if blames(error) is not None:  # the rank that is the cause prints its traceback
        name = type(error).__name__
        where = user_line(error)
        why = str(error).removeprefix(f"{errors.OVER}: ")  # the words of Horovod, for programs
        return f"farandole: this rank ends too{f', at {where}' if where else ''}: {why} [{name}]\n"
    found = traceback.TracebackException.from_exception(error)
    less = _without_ours(found)
    known = next((kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__), "")
    more = f"[{known}] is explained in docs/errors.md\n" if known else ""
    return "".join(found.format()) + (f"{LEFT_OUT}\n" if less else "") + more


def _without_ours(found: traceback.TracebackException | None) -> bool:
    if found is None:
        return False
    kept = [one for one in found.stack if not one.filename.startswith(OURS)]
    less = 0 < len(kept) < len(found.stack)
    if less:
        found.stack = traceback.StackSummary.from_list(kept)
    others = [_without_ours(found.__cause__), _without_ours(found.__context__)]
    return less or any(others)


def install_in_rank() -> None:
    """Does `install` in a process that our launcher started, for what may fail before or without init()."""
    with contextlib.suppress(ValueError):
        config = Config.from_environment()
        if config.report_fd is not None and config.tracebacks == "short":
            install()


def install() -> None:
    """Replaces Python's own hook; a hook that the script has set stays."""
    if sys.excepthook is not sys.__excepthook__:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, (Exception, KeyboardInterrupt)):
            sys.__excepthook__(kind, error, trace)
            return
        sys.stderr.write(text(error))
        sys.stderr.flush()

    sys.excepthook = hook


class Causes:
    """Why ranks of this host ended, for the errors of the others. Ranks of other hosts are not known here."""

    def __init__(self, directory: str, generation: int) -> None:
        self._directory = Path(directory)
        self._generation = generation

    def note(self, rank: int) -> None:
        """Notes the uncaught exception of this process; if another rank is its cause, what is known about that one."""
        error = getattr(sys, "last_value", None)
        if not isinstance(error, BaseException):
            return
        blamed = blames(error)
        cause = f"rank {rank} ended with {described(error)}" if blamed is None else self.of(blamed)
        if cause:
            with contextlib.suppress(OSError):
                self._file(rank).write_text(cause)

    def of(self, rank: int) -> str:
        """Why this rank ended, `rank 1 ended with ValueError: no data (train.py:41)`; the rank named may be another.
        "" if it is not known."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return self._file(rank).read_text()
        return ""

    def watch(self) -> None:
        """The errors of lost ranks name the cause from now on."""
        errors.causes[:] = [self.of]

    def _file(self, rank: int) -> Path:
        return self._directory / f"ended.{self._generation}.{rank}"
