"""Builds the core with CMake and Ninja of the virtual environment: `build.py check|library|tests|sanitize NAME`.
Touches build/ and src/farandole/engine/_native/. Without a compiler it prints one line that says what to do."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from environment import PYTHON, ROOT, VENV, installer, stop
from farandole.tools.progress import Progress

COMPILER = {"apt-get": "g++", "dnf": "gcc-c++", "zypper": "gcc-c++", "pacman": "gcc", "apk": "g++"}
HEADERS = {"apt-get": "python3-dev", "dnf": "python3-devel", "zypper": "python3-devel", "apk": "python3-dev"}
PROBE = "#include <coroutine>\n#include <bit>\nint main() { return std::popcount(3u) == 2 ? 0 : 1; }\n"


def compiler() -> str:
    """A C++20 compiler: $CXX, or the first one of the usual names that supports coroutines."""
    chosen = os.environ.get("CXX")
    found = []
    for name in [chosen] if chosen else ["c++", "g++", "clang++"]:
        if not shutil.which(name.split()[0]):
            continue
        found.append(name)
        command = [*name.split(), "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
        if subprocess.run(command, input=PROBE, capture_output=True, text=True).returncode == 0:
            return name
    if found:
        stop(f"build: {', '.join(found)} cannot compile C++20 (GCC 11 or Clang 14 can); run: {installer(COMPILER)}")
    missing = f"CXX={chosen} is no program here" if chosen else "no C++ compiler found"
    stop(f"build: {missing}; run: {installer(COMPILER)}")
    raise AssertionError  # stop() ends the process


def headers() -> None:
    """Checks for Python's headers, which the extension module needs. Debian has a separate package for them."""
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        stop(f"build: Python.h is not in {sysconfig.get_path('include')}; run: {installer(HEADERS)}")


def cores() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


def build(folder: str, defines: list[str], targets: list[str], chosen: str | None = None) -> None:
    """Configures once for these defines, then builds what changed with Ninja. `chosen`: the compiler; None: any."""
    where = ROOT / "build" / folder
    cmake, ninja = VENV / "bin" / "cmake", VENV / "bin" / "ninja"
    began = time.monotonic()
    where.parent.mkdir(exist_ok=True)
    lock = open(where.with_suffix(".lock"), "w")  # noqa: SIM115 (held until the process ends)
    fcntl.flock(lock, fcntl.LOCK_EX)  # a second build at the same time waits
    configure = [cmake, "-S", ROOT, "-B", where, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    configure += [f"-DPython_EXECUTABLE={PYTHON}", *defines]
    wanted, configured = "\n".join(map(str, configure)), where / "configured"
    if not configured.exists() or configured.read_text() != wanted:
        shutil.rmtree(where, ignore_errors=True)
        run([*map(str, configure), f"-DCMAKE_CXX_COMPILER={chosen or compiler()}"], where / "configure.log")
        configured.write_text(wanted)
    command = [str(cmake), "--build", str(where), "-j", str(cores())]
    for target in targets:
        command += ["--target", target]
    run(command, where / "build.log")
    lock.close()
    print(f"build: {folder} ({', '.join(targets) or 'everything'}) is up to date, {time.monotonic() - began:.0f} s")


def steps_of(log: Path) -> tuple[float | None, str]:
    """How far Ninja is: `[12/340]` in its log."""
    found = re.findall(r"^\[(\d+)/(\d+)\]", log.read_text(errors="replace"), flags=re.M)
    if not found:
        return None, log.stem
    done, all_of_them = map(int, found[-1])
    return done / all_of_them, f"file {done} of {all_of_them}"


def run(command: list[str], log: Path) -> None:
    """Runs a command. Its output goes to the log, which is printed only if the command fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w") as out, Progress("build", lambda: steps_of(log)):
        code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT).returncode
    if code != 0:
        print("\n".join(log.read_text(errors="replace").splitlines()[-60:]), file=sys.stderr)
        stop(f"build: {Path(command[0]).name} failed; the whole log is {log.relative_to(ROOT)}")


def main() -> None:
    """check: checks for a compiler and Python's headers. library: builds the product. tests: builds everything.

    sanitize NAME: builds the tests with a sanitizer.
    """
    what = sys.argv[1]
    here = ["-DFARANDOLE_TESTS=ON"]
    if what == "check":
        compiler()
        headers()
    elif what == "library":
        print("build: compiling the core (about a minute on 2 cores the first time)", flush=True)
        build("checkout", here, ["farandole", "farandole_bridge"])
    elif what == "tests":
        print("build: compiling the core and its tests (a few minutes the first time)", flush=True)
        build("checkout", here, [])
    elif what == "sanitize":
        name = sys.argv[2]
        print(f"build: compiling the C++ tests with -fsanitize={name} (a few minutes the first time)", flush=True)
        build(f"sanitize-{name.split(',')[0]}", [*here, f"-DFARANDOLE_SANITIZE={name}"], [])
    else:
        stop(f"build: no such thing: {what}")


if __name__ == "__main__":
    main()
