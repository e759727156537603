# JAX on 2 and 3 ranks: the battery, training, a rank that is killed, examples; compiled calls and callbacks.
# Touches the battery, its binding to JAX, jax_cases.py, the examples, the docs and the harness of tests/ranks.
"""A few jobs with many cases each: starting JAX takes longer than most cases."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import jobs
import pytest
from battery.run import check_all, check_case
from tensorflow_jobs import CACHE, ENVIRONMENT, results

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed"),
]
ROOT = Path(__file__).parents[2]
LAUNCH = "import sys; from farandole.launch.cli import horovodrun; sys.exit(horovodrun())"
# Two threads for XLA; quick compilation, since nearly every call is compiled.
JAX = {
    "JAX_ENABLE_X64": "1",
    "JAX_PLATFORMS": "cpu",
    "NPROC": "2",
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
}
FORMS = ["eager", "jit/compiled", "jit/callback"]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_battery(ranks: int) -> None:
    check_all(results("jax_binding.py", ranks, *FORMS, **JAX), ranks, FORMS, 35)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("way", "ranks"), [("compiled", 3), ("callback", 2)])
def test_training(way: str, ranks: int) -> None:
    if importlib.util.find_spec("optax") is None:
        pytest.skip("optax is not installed")
    found = results("jax_cases.py", ranks, "training", **JAX, FARANDOLE_JAX_OPS=way)
    assert len(found) == 11
    for name in found:
        check_case(found, name, ranks)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", ["compiled", "callback"])
def test_collectives_become_ready_in_any_order(way: str) -> None:
    found = results("jax_cases.py", 2, "order", **JAX, FARANDOLE_JAX_OPS=way)
    check_case(found, "collectives in any order", 2)


KILLED = """
import json, os, jax, jax.numpy as jnp
import farandole.jax as hvd
hvd.init()
step = jax.jit(lambda x: [hvd.allreduce(x + i, name=f"part{i}") for i in range(4)])
jax.block_until_ready(step(jnp.ones(1000)))
print(json.dumps({"pid": os.getpid()}), flush=True)
try:
    while True:
        jax.block_until_ready(step(jnp.ones(1000)))
except jax.errors.JaxRuntimeError as error:
    print(json.dumps({"error": type(hvd.translated(error)).__name__}), flush=True)
"""


@pytest.mark.timeout(200)
@pytest.mark.parametrize("way", ["compiled", "callback"])
def test_a_killed_rank_raises_on_the_others(way: str) -> None:
    environment = {**ENVIRONMENT, **JAX, "FARANDOLE_JAX_OPS": way}
    jobs.kill_one_of_three(KILLED, environment)


TREES = """
import json, jax, jax.numpy as jnp, numpy as np
import farandole.jax as hvd
from farandole.jax.elastic import JaxState
hvd.init()
hvd.init()  # once more on one rank alone
if hvd.rank() == 0:
    hvd.init()
rank = hvd.rank()
given = {"wide": np.array([1, 2**40 + rank]), "exact": np.array([1 / 3 + rank]), "array": jnp.full(3, 7.0 + rank)}
found = hvd.broadcast_parameters(given)
assert found["wide"].dtype == np.int64 and found["wide"].tolist() == [1, 2**40], found
assert found["exact"].dtype == np.float64 and found["exact"][0] == 1 / 3 and found["array"].tolist() == [7.0] * 3
mine = [(1, jnp.ones(2)), (2, jnp.zeros((0, 3)))] if rank == 0 else []
state = JaxState(history=mine, key=jax.random.key(5 + rank), counts=np.arange(3 + rank), epoch=rank)
state.sync()
assert [one[0] for one in state.history] == [1, 2] and state.history[0][1].tolist() == [1.0, 1.0]
assert state.history[1][1].shape == (0, 3) and state.counts.tolist() == [0, 1, 2] and state.epoch == 0
assert (jax.random.key_data(state.key) == jax.random.key_data(jax.random.key(5))).all()
try:
    state._load_tree({"counts": [np.arange(3)], "history": [1, np.ones(2, np.int32), 2, np.zeros((0, 3), np.float32)]})
    raise SystemExit("another type was taken")
except ValueError as error:
    assert "int32" in str(error), error
print(json.dumps({"well": True}), flush=True)
"""


@pytest.mark.timeout(200)
def test_trees_of_others_and_numbers_that_jax_would_narrow() -> None:
    environment = {**ENVIRONMENT, "JAX_PLATFORMS": "cpu", "FARANDOLE_JAX_OPS": "callback"}
    with jobs.local.start([sys.executable, "-c", TREES], 2, None, environment) as job:
        assert job.wait(120) == 0, [job.stderr(rank) for rank in range(2)]
        assert [jobs.results(job, rank) for rank in range(2)] == [[{"well": True}]] * 2


def test_missing_and_old_requirements_are_named() -> None:
    alone = "import sys, farandole; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", alone], check=True, timeout=30, env=ENVIRONMENT)
    for change, message in (
        ("sys.modules['jax'] = None", "not installed: pip install 'farandole[jax]'"),
        ("import jax; jax.__version__ = '0.4.30'", "this is 0.4.30: pip install --upgrade jax"),
    ):
        program = f"import sys\n{change}\nimport farandole.jax"
        environment = {**os.environ, **ENVIRONMENT}
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment
        )
        assert done.returncode == 1 and "ImportError" in done.stderr and message in done.stderr, done.stderr


def launched(script: Path, folder: str, *options: str) -> str:
    """What a script printed under horovodrun, in the folder `place`."""
    CACHE.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **ENVIRONMENT, "JAX_PLATFORMS": "cpu", "TMPDIR": folder, "TESTS_WITHOUT": ""}
    command = [sys.executable, "-c", LAUNCH, "-np", "2", sys.executable, str(script), *options]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["jax", "flax"])
def test_examples(kind: str) -> None:
    for module in ("sklearn", "optax", kind):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    with tempfile.TemporaryDirectory() as folder:
        output = launched(ROOT / "examples" / f"{kind}_digits.py", folder, "--epochs", "3")
    (accuracy,) = re.findall(r"\baccuracy ([\d.]+)%", output)  # one rank speaks
    assert float(accuracy) > 60


@pytest.mark.timeout(300)
def test_the_code_of_the_page() -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "jax.md").read_text(), flags=re.DOTALL)[0]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(code)
        assert "loss below 0.01: True" in launched(script, folder)
