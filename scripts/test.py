"""`make test`: `make check` and every other test, in the order in which a failure explains the next ones.
Starts the stages below; the tests themselves are in tests/."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import check
import sanitize
from check import PYTEST, PYTHON, QUICK, QUIET
from environment import APART
from stages import ROOT, Stage, run

SCRIPTS = ROOT / "scripts"
FUZZ_SECONDS = 60
NEWEST_TORCH = "install the newest torch"  # the title of a stage

# On x86_64 the newest torch brings 5 GB of CUDA libraries and is in build/other-torch, and .venv has torch 2.13.0.
# On Arm it is the other way round.
NEWEST_IS_APART = platform.machine() == "x86_64"
# Tests that `make test` runs with the newest torch and `make nightly` with 2.13.0: torch.distributed, the optimizer,
# Lightning and Accelerate, and the names by which torch and Lightning find this package.
ON_NEWEST = {
    "test_torch_distributed.py": "not (3 and ranks)",
    "test_torch_optimizer.py": "2-native",
    "test_lightning.py": "test_as_with_ddp",
    "test_torch_parallelism.py": "accelerate_digits",
    "test_checkout.py": "knows",
}


def selection(files: dict[str, str]) -> str:
    """The expression for pytest that selects the named tests of each file."""
    return " or ".join(f"({file.removesuffix('.py')} and ({names}))" for file, names in files.items())


def again(environment: str, files: dict[str, str]) -> Stage:
    """The stage that runs the chosen tests of each file in this environment: one of those in build/, or .venv."""
    python = APART[environment] / "bin" / "python" if environment in APART else PYTHON
    command: list[str | Path] = [python, *PYTEST[1:], "-n", "2", "--dist", "loadgroup", "-k", selection(files)]
    paths = [f"tests/frameworks/{file}" for file in files]
    return Stage(f"Python: on {environment}", [*command, *paths], environment=QUIET, after=NEWEST_TORCH)


def stages(packages: list[str]) -> list[Stage]:
    """All stages. At first the environment can only build the core; other packages are installed in the background."""
    rest = f"not ({QUICK}) and not nightly"
    environment: list[str | Path] = [PYTHON, SCRIPTS / "environment.py"]
    apart = [name for name in packages if name == "other-torch"]  # gigabytes on x86_64, and only needed at the end
    build, sanitized = sanitize.stages("address,undefined", background=True)
    fuzzer = Stage("build the fuzzers", [PYTHON, SCRIPTS / "fuzz.py", "build"], background=True)
    wheel = Stage("compile the wheel", [PYTHON, SCRIPTS / "wheel.py", "compile", "here"], background=True)
    found = [
        Stage("compile the core", [PYTHON, SCRIPTS / "build.py", "tests"], background=True),
        Stage("install packages", [*environment, *(name for name in packages if name not in apart)], needed=True),
        *(Stage(NEWEST_TORCH, [*environment, name], background=True) for name in apart),
        *check.stages(),
        build,
        fuzzer,
        wheel,
    ]
    fuzzing: list[str | Path] = [PYTHON, SCRIPTS / "fuzz.py", str(FUZZ_SECONDS)]
    # Half of the time they wait for processes, so three groups run at the same time.
    python: list[str | Path] = [*PYTEST, "-n", "3", "--dist", "loadgroup", "-m", rest, "tests"]
    if NEWEST_IS_APART:
        python += ["-k", f"not ({selection(ON_NEWEST)})"]
    found.append(Stage("Python: every other test, three groups at a time", python, environment=QUIET))
    if NEWEST_IS_APART:
        found.append(again("other-torch", ON_NEWEST))
    found += [
        sanitized,
        Stage("fuzzing of the wire and of whole engines", fuzzing, after=fuzzer.title),
        Stage("the wheel for this machine", [PYTHON, SCRIPTS / "wheel.py", "here"], after=wheel.title),
    ]
    return found


if __name__ == "__main__":
    print("make test: about an hour on 2 cores the first time", flush=True)
    sys.exit(run(stages(sys.argv[1:])))
