"""`fuzz.py SECONDS`: fuzzing of everything that reads bytes from another rank, and of whole engines with a hostile
rank. It starts from the saved inputs. `fuzz.py build` only builds the fuzzers. libFuzzer where Clang has it, else a
driver of our own with GCC (tests/fuzz/driver.h). Inputs that break something are kept in build/fuzz/found and fail the
run. Starts CMake and the fuzzers."""

from __future__ import annotations

import shutil
import subprocess
import sys

from build import build
from environment import ROOT

CLANG = "clang++-16"  # Debian's package; libFuzzer comes with libclang-rt-16-dev
SANITIZE = "address,undefined"
FUZZERS = ("wire", "engine")
LONGEST_INPUT = 4096  # bytes
BUILD_FOLDER = ROOT / "build" / "fuzz"


def command(name: str, seconds: str, libfuzzer: bool) -> list[str]:
    """The command of a fuzzer. Inputs that reach new code are kept for the next run."""
    kept, found, corpus = (
        BUILD_FOLDER / "corpus" / name,
        BUILD_FOLDER / "found" / name,
        ROOT / "tests" / "fuzz" / "corpus" / name,
    )
    for folder in (kept, found):
        folder.mkdir(parents=True, exist_ok=True)
    program = str(BUILD_FOLDER / f"{name}_fuzz")
    if not libfuzzer:
        return [program, "--seconds", seconds, str(kept), str(found), str(corpus)]
    limits = [f"-max_total_time={seconds}", f"-max_len={LONGEST_INPUT}", f"-artifact_prefix={found}/"]
    return [program, str(kept), str(corpus), *limits]


def report(name: str, output: str, code: int) -> None:
    """Prints one line, or the last lines if something was found."""
    lines = output.splitlines()
    progress = ("#", "\tNEW_FUNC")  # progress lines of libFuzzer; a failure comes after them
    shown = [line for line in lines if line.startswith("Done ") or (code != 0 and not line.startswith(progress))][-80:]
    print("\n".join(f"{name}: {line}" for line in shown))
    if code != 0:
        program, found = BUILD_FOLDER / f"{name}_fuzz", BUILD_FOLDER / "found" / name
        print(f"fuzz: an input that breaks it lies in {found}; `{program} {found}` runs it again")


def main() -> int:
    """Runs all fuzzers. Returns 0 if nothing was found."""
    if len(sys.argv) != 2 or not (sys.argv[1] == "build" or sys.argv[1].isdigit()):
        print("fuzz: usage: fuzz.py SECONDS, or fuzz.py build", file=sys.stderr)
        return 2
    libfuzzer = shutil.which(CLANG) is not None
    defines = ["-DFARANDOLE_FUZZ=ON", f"-DFARANDOLE_SANITIZE={'fuzzer-no-link,' * libfuzzer}{SANITIZE}"]
    build("fuzz", defines, [f"{name}_fuzz" for name in FUZZERS], CLANG if libfuzzer else None)
    if sys.argv[1] == "build":
        return 0
    running = {
        name: subprocess.Popen(
            command(name, sys.argv[1], libfuzzer), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for name in FUZZERS
    }
    for name, process in running.items():
        report(name, process.communicate()[0], process.returncode)
    codes: list[int] = [process.returncode for process in running.values()]
    return max(map(abs, codes))


if __name__ == "__main__":
    sys.exit(main())
