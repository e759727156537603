"""`make sanitize`: the C++ tests and the fuzz corpus under the address, undefined-behaviour and thread sanitizers.
Starts CMake and ctest; each sanitizer has a build folder of its own."""

from __future__ import annotations

import sys
from pathlib import Path

from stages import ROOT, Stage, run

PYTHON = Path(sys.executable)
SETTINGS = {
    "ASAN_OPTIONS": "detect_leaks=1:abort_on_error=0:strict_string_checks=1",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}


def stages() -> list[Stage]:
    """Build and run, for each sanitizer."""
    found = []
    for name in ("address,undefined", "thread"):
        folder = ROOT / "build" / f"sanitize-{name.split(',')[0]}"
        ctest: list[str | Path] = [PYTHON.with_name("ctest"), "--test-dir", folder]
        ctest += ["--output-on-failure", "--progress", "--timeout", "600"]
        found.append(Stage(f"build with {name}", [PYTHON, ROOT / "scripts" / "build.py", "sanitize", name]))
        found.append(Stage(f"C++ tests with {name}", ctest, environment=SETTINGS))
    return found


if __name__ == "__main__":
    print("make sanitize: about 10 minutes on 2 cores the first time", flush=True)
    sys.exit(run(stages()))
