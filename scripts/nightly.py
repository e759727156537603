"""`make nightly`: what takes too long for `make test`: the thread sanitizer, torch 2.13.0, the oldest releases of
the frameworks, more forms of the cases, wheels for both platforms, an hour of fuzzing, and `make chaos`. Starts the
stages below, each whatever became of the others."""

from __future__ import annotations

import sys
from pathlib import Path

import sanitize
import test
from check import PYTEST, PYTHON, QUIET
from stages import ROOT, Stage, run

FUZZ_SECONDS = 3600
# What is run on the oldest releases besides the tests of torch: JAX, Keras and Spark, and the private names of all.
ON_OLDEST = {
    "test_jax.py": "battery or training",
    "test_keras.py": "test_cases and (torch or jax)",
    "test_private_names.py": "(without or connector) and not mxnet",
    "test_spark.py": "run",
}


def stages(chaos: str) -> list[Stage]:
    """All stages; `chaos`: how often each fault test runs."""
    more: list[str | Path] = [*PYTEST, "-n", "2", "--dist", "loadgroup", "-m", "nightly"]
    more += ["tests/ranks", "tests/frameworks", "tests/strangers"]
    found = [*sanitize.stages("thread"), Stage("more forms of the cases", more, environment=QUIET)]
    found.append(test.again(".venv" if test.NEWEST_IS_APART else "other-torch", test.ON_NEWEST))  # torch 2.13.0
    found.append(test.again("oldest", {**test.ON_NEWEST, **ON_OLDEST}))
    found.append(Stage("wheels for x86_64 and aarch64", [PYTHON, ROOT / "scripts" / "wheel.py"]))
    fuzz: list[str | Path] = [PYTHON, ROOT / "scripts" / "fuzz.py", str(FUZZ_SECONDS)]
    return [*found, Stage("an hour of fuzzing", fuzz), Stage("chaos", ["make", "chaos", f"N={chaos}"])]


if __name__ == "__main__":
    sys.exit(run(stages(*sys.argv[1:])))
