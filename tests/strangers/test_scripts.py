# Scripts as Horovod's users write them, each with a habit of real ones, and numbers that it asserts at its end.
# Starts them through horovodrun, those of one framework in one job; drivers start their ranks themselves.
"""The scripts know nothing of Farandole: they import `horovod`. Each also runs by itself:
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
    # What TensorFlow and Lightning would import if it were there.
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
NEEDS = {"function": "torch", "lightning_strategy": "lightning", "ray_executor": "ray", "spark_run": "pyspark"}
pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(300)]


def run(command: list[str], patience: float = PATIENCE_S, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs a command with directories of its own; the name is short, since Ray has sockets below it."""
    with tempfile.TemporaryDirectory(prefix="s") as place:
        places = {"TMPDIR": place, "HOME": place, "TORCHINDUCTOR_CACHE_DIR": place}
        variables = {**os.environ, **VARIABLES, **places, **more}
        return subprocess.run(
            command, env=variables, cwd=place, capture_output=True, text=True, timeout=patience, check=False
        )


def launched(ranks: int, *words: str, patience: float = PATIENCE_S, **more: str) -> subprocess.CompletedProcess[str]:
    """A Python program under horovodrun; `more` are variables."""
    python = [sys.executable, "-W", "ignore"]
    return run([*python, "-c", HOROVODRUN, "-np", str(ranks), *python, *words], patience, **more)


@functools.cache
def verdicts(framework: str, ranks: int) -> tuple[dict[str, list[str]], str]:
    """What each rank said of each script, and the last words of jobs that failed. A job ends at a script that fails;
    another one goes on behind it."""
    folder = HERE / f"{framework}_programs"
    found: dict[str, list[str]] = {}
    words, rest = "", SCRIPTS[framework]
    while rest:
        done = launched(ranks, str(HERE / "many.py"), str(folder), *rest)
        for line in re.findall(r"^\[\d+\]<stdout>:(\{.*)$", done.stdout, flags=re.MULTILINE):
            said = json.loads(line)
            found.setdefault(said["script"], []).append(said["wrong"])
        if done.returncode == 0:
            break
        words += done.stderr[-3000:]
        failed = next((name for name in rest if found.get(name, []) != [""] * ranks), rest[-1])
        rest = rest[rest.index(failed) + 1 :]
    return found, words


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
    found, words = verdicts(framework, ranks)
    assert script in found, f"it was not reached; the job said:\n{words}"
    wrong = "\n".join(text for text in found[script] if text)
    assert not wrong, wrong
    assert len(found[script]) == ranks, f"not all ranks came to its end; the job said:\n{words}"


@pytest.mark.parametrize(
    "driver", ["function", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("ray_executor", "spark_run"))]
)
def test_driver(driver: str) -> None:
    if importlib.util.find_spec(NEEDS[driver]) is None:
        pytest.skip(f"{NEEDS[driver]} is not installed")
    program = str(HERE / "drivers" / f"{driver}.py")
    done = run([sys.executable, "-W", "ignore", program], TESTS_WITHOUT="matplotlib jax")  # Spark needs pandas
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2])
def test_lightning(ranks: int) -> None:
    pytest.importorskip("lightning_utilities", reason="Lightning is not installed")
    done = launched(ranks, str(HERE / "drivers" / "lightning_strategy.py"))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
