# A framework that is newer than any tested release: which processes warn, and how often.
# Touches farandole.launch and the installed frameworks, whose versions are changed in the ranks.
"""Two ranks of each binding; the executors of Ray and Spark warn in the process that creates them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from farandole.base import tested
from farandole.launch import local

SOURCE = str(Path(__file__).parents[2] / "src")
pytestmark = pytest.mark.ranks

BINDING = "import {0} as hvd; hvd.init(); hvd.shutdown(); hvd.init()"
GROUP = """
import torch.distributed as dist, farandole.torch.distributed
dist.init_process_group("farandole")
dist.new_group([0, 1])
dist.barrier()  # rank 0 has torch's store: no rank may need it any more when rank 0 leaves
dist.destroy_process_group()
"""
TRAINER = "lightning.Trainer(strategy='farandole', accelerator='cpu', logger=False, devices=1)"
# The frameworks, and what uses them twice.
RANKS = {
    "torch": (["torch"], BINDING.format("farandole.torch")),
    "torch.distributed": (["torch"], GROUP),
    "TensorFlow and Keras": (
        ["tensorflow", "keras"],
        "import farandole.tensorflow\n" + BINDING.format("farandole.keras"),
    ),
    "JAX": (["jax"], BINDING.format("farandole.jax")),
    "MXNet": (["mxnet"], BINDING.format("farandole.mxnet")),
    "Lightning": (["lightning"], TRAINER),
}
EXECUTORS = {
    "Ray": (["ray"], "from farandole.ray import RayExecutor\nfor _ in range(2): RayExecutor(num_workers=1)"),
    # Without a Spark application the executor only warns and fails.
    "Spark": (
        ["pyspark"],
        "import contextlib; from farandole.spark import SparkExecutor\n"
        "for _ in range(2):\n    with contextlib.suppress(RuntimeError): SparkExecutor(1)",
    ),
}


def program(names: list[str], text: str) -> list[str]:
    for name in names:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    newer = "".join(f"import {name}; {name}.__version__ = '99.1.0'\n" for name in names)
    return [sys.executable, "-c", newer + text]


def lines(names: list[str], printed: str) -> list[int]:
    return [printed.count(tested.newer_warning(name, "99.1.0")) for name in names]


@pytest.mark.parametrize("names, text", RANKS.values(), ids=RANKS)
def test_only_rank_0_warns_and_only_once(names: list[str], text: str, tmp_path: Path) -> None:
    environment = {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    with local.start(program(names, text), 2, env=environment, stop_on_failure=False) as job:
        assert job.wait(100) == 0, job.stderr(0) + job.stderr(1)
        output = [job.stderr(rank) for rank in range(2)]
        assert [lines(names, one) for one in output] == [[1] * len(names), [0] * len(names)], output


@pytest.mark.parametrize("names, text", EXECUTORS.values(), ids=EXECUTORS)
def test_executors_warn_once(names: list[str], text: str) -> None:
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    done = subprocess.run(program(names, text), env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and lines(names, done.stderr) == [1], done.stderr
