"""`make nightly`: what takes too long for `make test`: the thread sanitizer, the oldest releases of the frameworks, an
hour of fuzzing. The long chaos is `make chaos`, which the same target runs. Starts the stages below."""

from __future__ import annotations

import sys
from pathlib import Path

import sanitize
import test
from check import PYTEST, PYTHON, QUIET
from environment import APART
from stages import ROOT, Stage, run

FUZZ_SECONDS = 3600
# What is run on the oldest releases besides the tests of torch: JAX and Spark.
ON_OLDEST = {"test_jax.py": "battery or training", "test_spark.py": "run"}


def stages() -> list[Stage]:
    """All stages."""
    pytest: list[str | Path] = [APART["oldest"] / "bin" / "python", *PYTEST[1:]]
    found = [*sanitize.stages("thread"), *test.again("oldest")]
    for file, chosen in ON_OLDEST.items():
        command = [*pytest, "-k", chosen, f"tests/frameworks/{file}"]
        found.append(Stage(f"oldest: {file}", command, environment=QUIET))
    fuzz: list[str | Path] = [PYTHON, ROOT / "scripts" / "fuzz.py", str(FUZZ_SECONDS)]
    return [*found, Stage("an hour of fuzzing", fuzz)]


if __name__ == "__main__":
    sys.exit(run(stages()))
