# The battery on CUDA tensors, with 2 and 4 ranks that may share one GPU.
# Touches the battery and its binding to torch.
"""Skipped without a GPU; everything else about torch is tested without one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
import torch_binding
from battery.run import check_case, chosen, results

from farandole.launch import local

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


@pytest.mark.parametrize("size", [2, 4], ids=lambda size: f"{size} ranks")
def test_battery(size: int) -> None:
    found = results(Path(torch_binding.__file__), size, "cuda")
    for case in chosen(torch_binding.TorchBinding("cuda"), torch_binding.table("cuda")):
        check_case(found, case.name, size)


# NCCL allows one rank per GPU; Gloo replaces it if ranks share a GPU.
@pytest.mark.parametrize(
    "backend, ranks", [("farandole", 2), ("cpu:farandole,cuda:gloo", 2), ("cpu:farandole,cuda:nccl", 1)]
)
def test_torch_distributed(backend: str, ranks: int) -> None:
    environment = {"PYTHONPATH": str(HERE.parents[1] / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "torch_cuda_job.py"), backend]
    with local.start(command, ranks, env=environment, stop_on_failure=False) as job:
        assert job.wait(100) == 0, [job.stderr(rank)[-3000:] for rank in range(ranks)]
        shown = ["all_reduce on cpu", "all_reduce on cuda", "DDP", "ddp_hook", "unsharded", "sharded"]
        assert [job.stdout(rank).splitlines() for rank in range(ranks)] == [shown] * ranks
