"""`make check`: the checks that each change must pass: style, types, rules, C++ tests, unit tests,
ranks as threads. Starts the stages below; changes no file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import lint
from stages import ROOT, Stage, run

PYTHON = Path(sys.executable)
PYTEST: list[str | Path] = [PYTHON, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"]
PYTEST += ["--durations=10", "--alone"]
# One thread of arithmetic per process: the tests start more processes than there are cores.
QUIET = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# Tests that start processes, take long or need the frameworks run in `make test` or `make nightly`.
QUICK = "not ranks and not slow and not chaos and not nightly"


def cores() -> int:
    """How many tests run at the same time."""
    return min(4, max(2, len(os.sched_getaffinity(0))))


def stages() -> list[Stage]:
    """All stages. Types are checked in the background."""
    build: list[str | Path] = [PYTHON, ROOT / "scripts" / "build.py", "tests"]
    ctest: list[str | Path] = [PYTHON.with_name("ctest"), "--test-dir", ROOT / "build" / "checkout"]
    ctest += ["--output-on-failure", "--progress", "-j", "2"]
    quick: list[str | Path] = [*PYTEST, "-n", str(cores()), "-m", QUICK, "tests/unit", "tests/ranks"]
    return [
        *lint.stages(),
        Stage("build the core and its tests, warnings are errors", build, needed=True),
        Stage("C++ tests and the fuzz corpus", ctest),
        Stage("Python: unit, and ranks as threads", quick, environment=QUIET),
    ]


if __name__ == "__main__":
    sys.exit(run(stages()))
