# `farandole.notebook_launcher` has the arguments of Accelerate's function, and calls the function on ranks.
# Starts ranks.
from __future__ import annotations

import inspect
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import farandole


def total(rank_share: int) -> tuple[int, float, str]:
    import os

    import numpy as np

    farandole.init()
    found = farandole.allreduce(np.full(1, float(rank_share)), op=farandole.Sum, name="total")
    return farandole.size(), float(found[0]), os.environ["ACCELERATE_MIXED_PRECISION"]


@pytest.mark.ranks
def test_a_function_runs_on_ranks() -> None:
    found = farandole.notebook_launcher(total, (3,), num_processes=2, mixed_precision="bf16", use_port="1", rdzv_id="x")
    assert found == [(2, 6.0, "bf16")] * 2


def fails_once(path: str) -> str:
    first = Path(path)
    farandole.init()
    farandole.barrier()
    if not first.exists():
        farandole.barrier()  # all have looked
        first.touch()
        raise ValueError("the first time")
    return "the second time"


@pytest.mark.ranks
def test_it_calls_the_function_again(tmp_path: Path) -> None:
    path = str(tmp_path / "first")
    with pytest.raises(ValueError, match="the first time"):
        farandole.notebook_launcher(fails_once, (path,), num_processes=2)
    (tmp_path / "first").unlink()
    assert farandole.notebook_launcher(fails_once, (path,), 2, max_restarts=1) == ["the second time"] * 2


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"num_nodes": 2}, 'use farandole.run.function, args, hosts="host1:2,host2:2", np=4'),
        ({"node_rank": 1}, "node_rank=1: one call starts the ranks of all hosts"),
        ({"mixed_precision": "fp64"}, "mixed_precision='fp64': expected one of no, fp16, bf16, fp8"),
    ],
)
def test_arguments_that_do_not_fit(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        farandole.notebook_launcher(total, (1,), **more)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
def test_the_arguments_are_those_of_accelerate() -> None:
    import accelerate

    theirs = inspect.signature(accelerate.notebook_launcher).parameters.values()
    ours = inspect.signature(farandole.notebook_launcher).parameters.values()
    assert [(one.name, one.default) for one in ours] == [(one.name, one.default) for one in theirs]
