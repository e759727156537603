"""`make test`: builds everything and runs every test, in the order in which a failure explains the next ones.
Starts the stages below; the tests themselves are in tests/."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from stages import ROOT, Stage, run

PYTHON = Path(sys.executable)
BUILD = ROOT / "build" / "checkout"
PYTEST: list[str | Path] = [PYTHON, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "--durations=10"]
# One thread of arithmetic per process: the tests start more processes than there are cores.
QUIET = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# Folders of tests that start ranks. Where time or faults matter, they share the machine with nobody.
ALONE = ("bed", "ranks", "clusters", "security", "chaos")


def stages() -> list[Stage]:
    """All stages."""
    cores = str(min(4, max(2, len(os.sched_getaffinity(0)))))
    ctest: list[str | Path] = [PYTHON.with_name("ctest"), "--test-dir", BUILD]
    ctest += ["--output-on-failure", "--progress", "-j", "2"]
    found = [
        Stage("rules of the house", [PYTHON, ROOT / "scripts" / "house.py"]),
        Stage("build the core and its tests", [PYTHON, ROOT / "scripts/build.py", "tests"], True),
        Stage("compile the wheels, beside the tests", [PYTHON, ROOT / "scripts" / "wheel.py", "compile"], beside=True),
        Stage("C++ tests and the fuzz corpus", ctest),
        Stage("Python: unit", [*PYTEST, "-n", cores, "tests/unit"], environment=QUIET),
    ]
    for folder in ALONE:
        found.append(Stage(f"Python: {folder}", [*PYTEST, f"tests/{folder}"], environment=QUIET))
    two: list[str | Path] = [*PYTEST, "-n", "2", "--dist", "loadgroup", "tests/frameworks"]
    found.append(Stage("Python: frameworks, two files at a time", two, environment=QUIET))
    found.append(Stage("wheels for x86_64 and aarch64", [PYTHON, ROOT / "scripts" / "wheel.py"], after=True))
    return found


if __name__ == "__main__":
    print("make test: about an hour on 2 cores the first time", flush=True)
    sys.exit(run(stages()))
