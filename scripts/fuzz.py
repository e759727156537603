"""`fuzz.py SECONDS`: libFuzzer on everything that reads bytes from another rank, from the saved inputs on; `build` for
SECONDS builds it alone. Needs Clang with libFuzzer; what it finds lies in build/fuzz/found and fails the run. Starts
CMake and the fuzzer."""

from __future__ import annotations

import shutil
import subprocess
import sys

from build import build
from environment import ROOT, installer

CLANG = "clang++-16"  # Debian's package; libFuzzer comes with libclang-rt-16-dev
SANITIZE = "fuzzer-no-link,address,undefined"
LONGEST_INPUT = 4096  # bytes


def main() -> int:
    """0: nothing was found."""
    if len(sys.argv) != 2 or not (sys.argv[1] == "build" or sys.argv[1].isdigit()):
        print("fuzz: usage: fuzz.py SECONDS, or fuzz.py build", file=sys.stderr)
        return 2
    if shutil.which(CLANG) is None:
        remedy = installer({"apt-get": "clang-16 libclang-rt-16-dev"})
        print(f"fuzz: skipped, because there is no {CLANG}; to have it: {remedy}")
        return 0
    defines = ["-DFARANDOLE_FUZZ=ON", f"-DFARANDOLE_SANITIZE={SANITIZE}"]
    build("fuzz", defines, ["wire_fuzz"], CLANG)
    if sys.argv[1] == "build":
        return 0
    place = ROOT / "build" / "fuzz"
    for name in ("corpus", "found"):
        (place / name).mkdir(exist_ok=True)
    # New inputs that reach new code are kept in the first folder, for the next run.
    command = [str(part) for part in (place / "wire_fuzz", place / "corpus", ROOT / "tests" / "fuzz" / "corpus")]
    command += [f"-max_total_time={sys.argv[1]}", f"-max_len={LONGEST_INPUT}", f"-artifact_prefix={place / 'found'}/"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = done.stdout.splitlines()
    shown = [line for line in lines if line.startswith("Done ")] if done.returncode == 0 else lines[-80:]
    print("\n".join(shown))
    if done.returncode != 0:
        print(f"fuzz: an input that breaks it lies in {place / 'found'}; run {place / 'wire_fuzz'} with it")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
