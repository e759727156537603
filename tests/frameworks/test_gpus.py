# Lightning and JAX on GPUs, with ranks that may share one.
# Touches the launcher and the two programs.
"""Skipped without a GPU. test_torch_cuda.py tests the operations; everything else is tested without a GPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

HERE = Path(__file__).parent
RANKS = 2

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


def shown(program: str, scratch: Path) -> list[list[str]]:
    """What each rank printed."""
    command = [sys.executable, "-m", "farandole", "run", "-np", str(RANKS), sys.executable, str(HERE / program)]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1] / "src"), "OMP_NUM_THREADS": "1"}
    environment["TMPDIR"] = str(scratch)  # torch leaves its cache there
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-5000:]
    lines = [line.partition("<stdout>:") for line in done.stdout.splitlines()]
    return [[text for index, _, text in lines if index == f"[{rank}]"] for rank in range(RANKS)]


def test_lightning(tmp_path: Path) -> None:
    if not any(importlib.util.find_spec(name) for name in ("lightning", "pytorch_lightning")):
        pytest.skip("Lightning is not installed")
    precisions = ("32-true", "16-mixed", "bf16-mixed")
    wanted = [f"{what}: {precision}" for what in ("as DDP", "FSDP") for precision in precisions]
    assert shown("lightning_cuda_job.py", tmp_path) == [wanted] * RANKS


def test_jax(tmp_path: Path) -> None:
    names = {found.metadata["Name"] or "" for found in importlib.metadata.distributions()}
    if not any(name.startswith("jax-cuda") for name in names):
        pytest.skip("JAX is installed without support for GPUs")
    assert shown("jax_cuda_job.py", tmp_path) == [["at once", "jit", "grad", "scan", "tree"]] * RANKS
