"""`sanitize.py NAME...`: runs C++ tests and the fuzz corpus with the sanitizers `address,undefined` and `thread`.
Starts CMake and ctest; each sanitizer has its own build folder."""

from __future__ import annotations

import sys
from pathlib import Path

from stages import ROOT, Stage, chosen, run

PYTHON = Path(sys.executable)
SANITIZERS = ("address,undefined", "thread")
SETTINGS = {
    "ASAN_OPTIONS": "detect_leaks=1:abort_on_error=0:strict_string_checks=1",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}


def stages(name: str, background: bool = False) -> list[Stage]:
    """The stages for one sanitizer. `background`: only the build runs in the background, as tests have time limits."""
    folder = ROOT / "build" / f"sanitize-{name.split(',')[0]}"
    ctest: list[str | Path] = [PYTHON.with_name("ctest"), "--test-dir", folder]
    ctest += ["--output-on-failure", "--progress", "--timeout", "600", "-j", "2"]
    build: list[str | Path] = [PYTHON, ROOT / "scripts" / "build.py", "sanitize", name]
    title = f"build with {name}"
    return [
        Stage(title, build, background=background),
        Stage(f"C++ tests with {name}", ctest, environment=SETTINGS, after=title),
    ]


def main() -> int:
    """Runs all sanitizers, or the given ones."""
    names = chosen("sanitize", "sanitizer", SANITIZERS)
    return run([stage for name in names for stage in stages(name)])


if __name__ == "__main__":
    sys.exit(main())
