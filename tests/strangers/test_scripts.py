# Scripts as Horovod's users write them. Each does one thing that real scripts do, and checks its results at its end.
# Starts horovodrun, one job for all scripts of a framework; the scripts in drivers/ start their ranks themselves.
"""The scripts import `horovod` and not Farandole. Each can also be started alone:
`horovodrun -np 2 python tests/strangers/torch_programs/mnist.py`."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import jobs
import pytest

HERE = Path(__file__).parent
FRAMEWORKS = HERE.parent / "frameworks"
HOROVODRUN = "import sys; from farandole.launch.cli import horovodrun; sys.exit(horovodrun())"
VARIABLES = {
    "PYTHONPATH": f"{jobs.SOURCE}:{FRAMEWORKS}",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "FARANDOLE_CACHE_DIRECTORY": str(HERE.parents[1] / "build" / "cache"),
    # Modules that TensorFlow and Lightning import if they find them; these tests hide them.
    "TESTS_WITHOUT": "sklearn matplotlib pandas jax",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYSPARK_PYTHON": sys.executable,
    "SPARK_LOCAL_IP": "127.0.0.1",
}
PATIENCE_S = 280
SCRIPTS = {
    folder: sorted(path.stem for path in (HERE / f"{folder}_programs").glob("*.py"))
    for folder in ("torch", "tensorflow")
}
NEEDED_MODULE = {"function": "torch", "lightning_strategy": "lightning", "ray_executor": "ray", "spark_run": "pyspark"}
pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(300)]


def run(command: list[str], patience: float = PATIENCE_S, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in a new directory with a short name: Ray makes sockets there, and their paths must be short."""
    with tempfile.TemporaryDirectory(prefix="s") as directory:
        directories = {"TMPDIR": directory, "HOME": directory, "TORCHINDUCTOR_CACHE_DIR": directory}
        variables = {**os.environ, **VARIABLES, **directories, **more}
        return subprocess.run(
            command, env=variables, cwd=directory, capture_output=True, text=True, timeout=patience, check=False
        )


def launched(ranks: int, *words: str, patience: float = PATIENCE_S, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs a Python program under horovodrun. `more` are environment variables."""
    python = [sys.executable, "-W", "ignore"]
    return run([*python, "-c", HOROVODRUN, "-np", str(ranks), *python, *words], patience, **more)


@functools.cache
def reports(framework: str, ranks: int) -> tuple[dict[str, list[str]], str]:
    """Returns what each rank reported about each script (empty if it succeeded), and the end of stderr of failed jobs.
    A job ends at the first script that fails; then another job runs the scripts after it."""
    folder = HERE / f"{framework}_programs"
    found: dict[str, list[str]] = {}
    stderr_ends, remaining = "", SCRIPTS[framework]
    while remaining:
        done = launched(ranks, str(HERE / "many.py"), str(folder), *remaining)
        for line in re.findall(r"^\[\d+\]<stdout>:(\{.*)$", done.stdout, flags=re.MULTILINE):
            report = json.loads(line)
            found.setdefault(report["script"], []).append(report["wrong"])
        if done.returncode == 0:
            break
        stderr_ends += done.stderr[-3000:]
        failed = next((name for name in remaining if found.get(name, []) != [""] * ranks), remaining[-1])
        remaining = remaining[remaining.index(failed) + 1 :]
    return found, stderr_ends


CASES = [
    pytest.param(framework, script, ranks, id=f"{script}-{ranks}", marks=[pytest.mark.nightly] * (ranks == 3))
    for framework, scripts in SCRIPTS.items()
    for ranks in (2, 3)
    for script in scripts
]


@pytest.mark.parametrize(("framework", "script", "ranks"), CASES)
def test_script(framework: str, script: str, ranks: int) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    found, stderr_ends = reports(framework, ranks)
    assert script in found, f"it was not reached; the job said:\n{stderr_ends}"
    wrong = "\n".join(text for text in found[script] if text)
    assert not wrong, wrong
    assert len(found[script]) == ranks, f"not all ranks came to its end; the job said:\n{stderr_ends}"


@pytest.mark.parametrize(
    "driver", ["function", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("ray_executor", "spark_run"))]
)
def test_driver(driver: str) -> None:
    if importlib.util.find_spec(NEEDED_MODULE[driver]) is None:
        pytest.skip(f"{NEEDED_MODULE[driver]} is not installed")
    program = str(HERE / "drivers" / f"{driver}.py")
    done = run([sys.executable, "-W", "ignore", program], TESTS_WITHOUT="matplotlib jax")  # Spark needs pandas
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2])
def test_lightning(ranks: int) -> None:
    pytest.importorskip("lightning_utilities", reason="Lightning is not installed")
    done = launched(ranks, str(HERE / "drivers" / "lightning_strategy.py"))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
