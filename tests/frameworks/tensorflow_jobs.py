# What the tests of TensorFlow and Keras share: how their jobs are started, where compiled operations are kept.
# Touches the battery's runner and the harness of tests/ranks.
"""`results(program, ranks, ...)` runs a table of cases, as the battery's own does, with more time and variables."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path

import jobs
import pytest

HERE = Path(__file__).parent
# Compiled once for all tests, and kept with what else was built.
CACHE = HERE.parents[1] / "build" / "cache"
ENVIRONMENT = {
    "PYTHONPATH": f"{jobs.SOURCE}:{HERE}",
    "OMP_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "CUDA_VISIBLE_DEVICES": "",
    "FARANDOLE_CACHE_DIRECTORY": str(CACHE),
    "TESTS_WITHOUT": "sklearn matplotlib pandas",
}
TENSORFLOW = {**ENVIRONMENT, "TESTS_WITHOUT": f"{ENVIRONMENT['TESTS_WITHOUT']} jax"}
JOB_S = 420.0

needs_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)


def results(program: str, size: int, *arguments: str, **environment: str) -> dict[str, list[str]]:
    """What was wrong with each case, by rank."""
    CACHE.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(HERE / program), *arguments]
    found: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as path:  # TensorFlow and torch leave files there when they are killed
        variables = {**ENVIRONMENT, **environment, "TMPDIR": path, "TORCHINDUCTOR_CACHE_DIR": path}
        with jobs.local.start(command, size, None, variables, stop_on_failure=False) as job:
            code = job.wait(JOB_S)
            for rank in range(size):
                for line in jobs.results(job, rank):
                    if line["case"]:
                        found.setdefault(line["case"], []).append(line["wrong"])
            assert code == 0, f"exit codes {job.codes} after {list(found)[-1:]}:\n" + "\n".join(
                f"rank {rank}: {job.stderr(rank)[-4000:]}" for rank in range(size)
            )
    return found
