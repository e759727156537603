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
# Folders of tests that start ranks and need no framework. Most of their time they wait.
WITH_RANKS = ("ranks", "bed", "clusters", "security", "chaos")


# On x86_64 the newest torch brings 5 GB of CUDA libraries and is in build/other-torch. On Arm build/other-torch has
# torch 2.13.0, for `make nightly`.
NEWEST_IS_APART = platform.machine() == "x86_64"
# Tests that run again with another release of torch: torch.distributed, the optimizer, Lightning and Accelerate,
# and the names by which torch and Lightning find this package.
ON_OTHER_TORCH = {
    "test_torch_distributed.py": "not (3 and ranks)",
    "test_torch_optimizer.py": "2-native",
    "test_lightning.py": "test_as_with_ddp",
    "test_torch_parallelism.py": "accelerate_digits",
    "test_checkout.py": "knows",
}


def again(place: str, files: dict[str, str]) -> Stage:
    """The stage that runs the chosen tests of each file in another environment."""
    chosen = " or ".join(f"({file.removesuffix('.py')} and ({names}))" for file, names in files.items())
    pytest: list[str | Path] = [APART[place] / "bin" / "python", *PYTEST[1:], "-n", "2", "--dist", "loadgroup"]
    paths = [f"tests/frameworks/{file}" for file in files]
    return Stage(f"Python: on {place}", [*pytest, "-k", chosen, *paths], environment=QUIET, after=True)


def stages(packages: list[str]) -> list[Stage]:
    """All stages. At first the environment can only build the core; other packages are installed in the background."""
    rest = f"not ({QUICK}) and not nightly"
    environment: list[str | Path] = [PYTHON, SCRIPTS / "environment.py"]
    apart = [name for name in packages if name == "other-torch"]  # gigabytes on x86_64, and only needed at the end
    build, sanitized = sanitize.stages("address,undefined", background=True)
    fuzzer = Stage("build the fuzzers", [PYTHON, SCRIPTS / "fuzz.py", "build"], background=True)
    wheel = Stage("compile the wheel", [PYTHON, SCRIPTS / "wheel.py", "compile", "here"], background=True)
    unit: list[str | Path] = [*PYTEST, "-n", str(check.cores()), "-m", rest, "tests/unit"]
    found = [
        Stage("compile the core", [PYTHON, SCRIPTS / "build.py", "tests"], background=True),
        Stage("install packages", [*environment, *(name for name in packages if name not in apart)], needed=True),
        *(Stage("install the newest torch", [*environment, name], background=True) for name in apart),
        *check.stages(),
        build,
        fuzzer,
        wheel,
        Stage("Python: unit, with processes", unit, environment=QUIET),
    ]
    two: list[str | Path] = [*PYTEST, "-n", "2", "--dist"]
    ranks = [*two, "loadfile", "-m", rest, *(f"tests/{folder}" for folder in WITH_RANKS)]
    found.append(Stage(f"Python: {', '.join(WITH_RANKS)}, two files at a time", ranks, environment=QUIET))
    # Most of their time they wait for processes.
    frameworks = [*PYTEST, "-n", "3", "--dist", "loadgroup", "-m", "not nightly"]
    frameworks += ["tests/frameworks", "tests/strangers"]
    found.append(Stage("Python: frameworks and strangers, three files at a time", frameworks, environment=QUIET))
    if NEWEST_IS_APART:
        found.append(again("other-torch", ON_OTHER_TORCH))
    found += [
        sanitized,
        Stage("fuzzing of the wire and of whole engines", [PYTHON, SCRIPTS / "fuzz.py", str(FUZZ_SECONDS)]),
        Stage("the wheel for this machine", [PYTHON, SCRIPTS / "wheel.py", "here"]),
    ]
    return found


if __name__ == "__main__":
    print("make test: about an hour on 2 cores the first time", flush=True)
    sys.exit(run(stages(sys.argv[1:])))
