# What runs in each rank of `farandole check`: the user's script, watched, and then a report.
# Touches sys.argv, sys.path and __main__ as Python does for a script; writes one file.
"""`main()` runs the script in `__main__`. The report is one file of JSON for each rank; judge.py compares them."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from farandole.base import ending, tracebacks
from farandole.tools.check import lines, with_keras, with_torch
from farandole.tools.check.report import Enough, Report


@contextlib.contextmanager
def _reported(report: Report, script: str) -> Iterator[None]:
    """Notes how the script ends."""
    try:
        yield
        report.found["ended"] = "end"
    except Enough:
        report.found["ended"] = "enough"
    except SystemExit as end:
        report.found["ended"] = "end" if end.code in (None, 0) else "error"
        report.found["error"] = f"the script ended with exit code {end.code}" if end.code not in (None, 0) else ""
        if report.found["ended"] == "error":
            raise
    except BaseException as error:
        report.found["ended"] = "error"
        report.found["error"] = f"{type(error).__name__}: {error}"
        report.found["line"] = tracebacks.user_line(error)
        report.found["collateral"] = ending.blames(error) is not None
        if report.found.get("cut"):  # passes of one batch may be too short for it
            report.found["ended"] = "cut"
            return
        raise


def main() -> None:
    """`python -c` runs this in each rank: `FOLDER STEPS SECONDS SCRIPT ARGUMENTS...`"""
    folder, steps, seconds, script, *arguments = sys.argv[1:]
    names = lines.imported(script)
    report = Report(Path(folder), int(steps), names)
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    began = time.monotonic()
    report.end_after(float(seconds))
    if names & lines.WITH_TORCH:
        report.closing.append(with_torch.Watch(report).finish)
    if names & lines.WITH_KERAS:
        report.closing.append(with_keras.Watch(report).finish)
    report.watch_init()
    report.watch_files()
    tracebacks.install()
    inside = sys.modules["__main__"].__dict__
    inside.update(__file__=os.path.abspath(script), __name__="__main__")
    try:
        with _reported(report, script):
            exec(compile(Path(script).read_bytes(), os.path.abspath(script), "exec"), inside)
    finally:
        report.found["seconds"] = time.monotonic() - began
        report.write()
