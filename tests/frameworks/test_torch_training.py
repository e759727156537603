# Training on several ranks gives the same as on the whole batch; a run with irregular steps ends with success.
# Touches farandole.launch and torch_training_cases.py.
"""Equal parameters after 50 steps on shards; 300 steps with random order, missing gradients and process sets."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from farandole.launch import local

pytest.importorskip("torch")
HERE = Path(__file__).parent
ENVIRONMENT = {"PYTHONPATH": str(HERE.parents[1] / "src"), "OMP_NUM_THREADS": "1"}


def run(mode: str, ranks: int, scratch: Path) -> list[Any]:
    command = [sys.executable, str(HERE / "torch_training_cases.py"), mode]
    # torch keeps a cache of compiled code, even an empty one: it goes where the test cleans up.
    environment = {**ENVIRONMENT, "TORCHINDUCTOR_CACHE_DIR": str(scratch)}
    with local.start(command, ranks, env=environment, stop_on_failure=False) as job:
        job.wait(100)
        output = [f"rank {rank}: {job.stdout(rank)} {job.stderr(rank)[-3000:]}" for rank in range(ranks)]
        assert list(job.codes) == [0] * ranks, "\n".join(output)
        return [json.loads(job.stdout(rank).splitlines()[-1]) for rank in range(ranks)]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_shards_are_the_whole_batch(ranks: int, tmp_path: Path) -> None:
    for found in run("shards", ranks, tmp_path):
        optimizers = ("SGD", "momentum", "Adam", "AdamW")
        wanted = {f"{kind} {name} torch.float64" for kind in ("cnn", "transformer") for name in optimizers}
        wanted |= {f"{kind} SGD torch.float32" for kind in ("cnn", "transformer", "sparse")}
        wanted |= {f"sparse {name} torch.float64" for name in ("SGD", "momentum", "SparseAdam")}
        wanted |= {f"sparse as dense {name} torch.float64" for name in ("momentum", "Adam", "AdamW")}
        assert set(found) == wanted
        for what, difference in found.items():
            assert difference < (1e-9 if "float64" in what else 1e-5), (what, difference)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_training_with_irregular_steps_matches_one_process(ranks: int, tmp_path: Path) -> None:
    run("chaos", ranks, tmp_path)
