# Scripts with the commonest mistakes, and scripts that only look like them, as a user starts them.
# Touches farandole.launch, and torch's entry point as `pip install` leaves it.
"""Each script runs with `farandole run -np 2`; what the launcher and the ranks say is compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from entry_point import install

from farandole.launch import local

pytest.importorskip("torch")
SOURCE = str(Path(__file__).parents[2] / "src")
STEPS = """
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(8, 4)).square().mean().backward()
        optimizer.step()
"""
ALONE = "import torch" + STEPS + "train(20)"
JOINED = "import torch, farandole.torch as hvd\nhvd.init()" + STEPS
PROCESS_GROUP = (
    "import torch, torch.distributed as dist\ndist.init_process_group('gloo')" + STEPS + "train(20)\ndist.barrier()\n"
    "dist.destroy_process_group()"
)
WRAPPED = "optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())\n"
BROADCAST = "hvd.broadcast_parameters(model.state_dict(), 0)\n"
AVERAGE = "\nhvd.allreduce(torch.ones(1), name='loss')"


def run(tmp_path: Path, script: str, ranks: int = 2, **more: str) -> str:
    """What the job says on stderr; it must end with 0."""
    command = [sys.executable, "-m", "farandole", "run", "-np", str(ranks), sys.executable, "-c", script]
    path = f"{SOURCE}:{install(tmp_path)}"
    # What torch leaves goes where the test cleans up.
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **cache, **more}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.ranks
def test_no_rank_calls_init(tmp_path: Path) -> None:
    output = run(tmp_path, ALONE)
    during = "this process is rank 0 of 2 and trains, but it has not called init()"
    assert output.count(during) == output.count("has not called init()") == 1, output
    assert output.count("farandole: no rank has called init(), so each has trained a model of its own") == 1, output
    assert "import farandole.torch as hvd; hvd.init()" in output


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("script", "ranks", "hints"),
    [
        ("import torch", 2, "1"),
        (PROCESS_GROUP, 2, "1"),
        (ALONE, 1, "1"),
        (ALONE, 2, "0"),
    ],
    ids=["no training", "torch.distributed trains", "one rank", "switched off"],
)
def test_commands_that_do_not_call_init(tmp_path: Path, script: str, ranks: int, hints: str) -> None:
    assert "a model of its own" not in run(tmp_path, script, ranks, FARANDOLE_HINTS=hints)


@pytest.mark.ranks
@pytest.mark.parametrize("ending", ["", "\nhvd.shutdown()"], ids=["at exit", "at shutdown"])
def test_nothing_is_reduced(tmp_path: Path, ending: str) -> None:
    output = run(tmp_path, JOINED + BROADCAST + "train(150)" + AVERAGE + ending)
    assert output.count("the optimizer of rank 0 has stepped 150 times") == output.count("reduced no gradients") == 1, (
        output
    )


@pytest.mark.ranks
@pytest.mark.parametrize(
    "script",
    [
        JOINED + WRAPPED + BROADCAST + "train(150)",
        JOINED + "train(150)\nhvd.allgather(torch.ones(1))\nhvd.barrier()",
        JOINED + BROADCAST + "train(150)\nhvd.allgather(torch.ones(100))",
        JOINED + "hvd.barrier()",
    ],
    ids=[
        "gradients are reduced",
        "models of their own, compared",
        "the script exchanges weights itself",
        "no training",
    ],
)
def test_jobs_that_call_reductions_themselves_get_no_warning(tmp_path: Path, script: str) -> None:
    assert "reduced no gradients" not in run(tmp_path, script)


@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "engine"), [(2, "native"), (3, "python")])
def test_parameters_that_differ(ranks: int, engine: str, tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("torch_comparison_cases.py"))]
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    environment = {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "FARANDOLE_ENGINE": engine, **cache}
    with local.start(command, ranks, env=environment, stop_on_failure=False) as job:
        job.wait(200)
        assert list(job.codes) == [0] * ranks, [job.stdout(0)[-3000:].replace("\\n", "\n"), job.stderr(0)[-1000:]]
        found = json.loads(job.stdout(0).splitlines()[-1])
        assert found.pop("left behind") == 0
        assert found and set(found.values()) == {"ok"}, found


@pytest.mark.ranks
def test_the_comparison_can_be_switched_off_on_one_rank(tmp_path: Path) -> None:
    """The ranks agree: a setting that only one of them has keeps no other waiting."""
    script = "import os\nif os.environ['RANK'] == '1': os.environ['FARANDOLE_CHECK_PARAMETERS'] = '0'\n"
    script += JOINED.replace("hvd.init()", "hvd.init(); torch.manual_seed(hvd.rank())") + WRAPPED + "train(3)"
    assert "different models" not in run(tmp_path, script)
