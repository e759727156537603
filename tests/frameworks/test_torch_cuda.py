# The battery on CUDA tensors, with 2 and 4 ranks that may share one GPU.
# Touches the battery and its binding to torch.
"""Skipped where there is no GPU; everything else about torch is tested without one."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
import torch_binding
from battery.run import chosen, judge, results

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


@pytest.mark.parametrize("size", [2, 4], ids=lambda size: f"{size} ranks")
def test_battery(size: int) -> None:
    found = results(Path(torch_binding.__file__), size, "cuda")
    for case in chosen(torch_binding.TorchBinding("cuda"), torch_binding.table("cuda")):
        judge(found, case.name, size)
