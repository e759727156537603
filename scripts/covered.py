"""`make coverage`: how much of Python and of C++ the tests run, by room, as a table for CONTRIBUTING.md.
Writes build/coverage; starts CMake, ctest, pytest, coverage and gcovr."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from build import build
from check import PYTHON, QUIET
from stages import ROOT, chosen

FOLDER = ROOT / "build" / "coverage"
FOLDERS = ("unit", "ranks", "security", "chaos", "bed", "clusters", "frameworks")
SETTINGS = """[run]
branch = false
parallel = true
patch = subprocess, _exit
source_pkgs = farandole
data_file = {folder}/python
"""


def run(command: Iterable[str | Path], **more: str) -> int:
    """Runs a command. Returns the exit code."""
    arguments = [str(part) for part in command]
    return subprocess.run(arguments, cwd=ROOT, env={**os.environ, **QUIET, **more}).returncode


def measure(folders: Iterable[str]) -> int:
    """Runs the C++ tests, then the tests in the folders, with the instrumented library. Returns the failed runs."""
    build("coverage", ["-DFARANDOLE_TESTS=ON", "-DFARANDOLE_COVERAGE=ON"], [])
    settings = FOLDER / "coveragerc"
    settings.write_text(SETTINGS.format(folder=FOLDER))
    for old in [*FOLDER.glob("python*"), *FOLDER.rglob("*.gcda")]:
        old.unlink()
    failed = [run([PYTHON.with_name("ctest"), "--test-dir", FOLDER, "--output-on-failure", "-j", "2"])]
    library = {"FARANDOLE_LIBRARY": str(FOLDER / "libfarandole_chaos.so"), "COVERAGE_PROCESS_START": str(settings)}
    for folder in folders:
        pytest: list[str | Path] = [PYTHON, "-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest", "-q"]
        pytest += ["--no-header", "-p", "no:cacheprovider", "-o", "timeout=600", f"tests/{folder}"]
        failed.append(run(pytest, **library))
    run([PYTHON, "-m", "coverage", "combine", "--quiet", f"--rcfile={settings}", FOLDER])
    run([PYTHON, "-m", "coverage", "json", "--quiet", f"--rcfile={settings}", "-o", FOLDER / "python.json"])
    gcovr: list[str | Path] = [PYTHON, "-m", "gcovr", "--root", ROOT, "--filter", "core/", "--json-summary"]
    run([*gcovr, FOLDER / "core.json", FOLDER])
    return sum(code != 0 for code in failed)


def room(path: str) -> str:
    """The room of a file: src/farandole/torch for src/farandole/torch/ops.py, core/engine for core/engine/engine.cc."""
    parts = Path(path).parts
    depth = 3 if parts[0] == "src" else 2
    return "/".join(parts[: min(depth, len(parts) - 1)])


def table(found: Iterable[tuple[str, int, int]]) -> list[str]:
    """Rows of (file, lines run, lines) as one line per room."""
    rooms: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for path, covered, lines in found:
        rooms[room(path)][0] += covered
        rooms[room(path)][1] += lines
    return [
        f"| `{name}` | {lines} | {100 * covered / lines:.0f} % |" for name, (covered, lines) in sorted(rooms.items())
    ]


def main() -> int:
    """Measures all folders of tests, or the given ones."""
    folders = chosen("coverage", "folder of tests", FOLDERS)
    if shutil.which("gcov") is None:
        print("coverage: gcov is missing: it comes with gcc", file=sys.stderr)
        return 1
    failed = measure(folders)
    python = json.loads((FOLDER / "python.json").read_text())["files"]
    core = json.loads((FOLDER / "core.json").read_text())["files"]
    rows = [(path, it["summary"]["covered_lines"], it["summary"]["num_statements"]) for path, it in python.items()]
    rows += [(it["filename"], it["line_covered"], it["line_total"]) for it in core]
    print("\n| room | lines | run by tests |\n|---|---|---|")
    print("\n".join(table(row for row in rows if row[2])))
    if failed:
        print(f"coverage: {failed} of the runs failed: see above", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
