# The battery on torch with 2 and 3 ranks: one job each, one test per case.
# Touches the battery and its binding to torch.
"""The whole table of cases, including errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import jobs
import torch_binding
from battery.run import check_case, chosen, results

pytestmark = pytest.mark.ranks
CASES = [case.name for case in chosen(torch_binding.TorchBinding(), torch_binding.table())]


@pytest.fixture(scope="module", params=[2, 3], ids=lambda size: f"{size} ranks")
def found(request: pytest.FixtureRequest) -> tuple[int, dict[str, list[str]]]:
    return request.param, results(Path(torch_binding.__file__), request.param)


@pytest.mark.parametrize("name", CASES)
def test_case(found: tuple[int, dict[str, list[str]]], name: str) -> None:
    size, wrong = found
    check_case(wrong, name, size)


def test_farandole_alone_imports_no_framework() -> None:
    program = "import sys, farandole; sys.exit(any(name.split('.')[0] == 'torch' for name in sys.modules))"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30, env={"PYTHONPATH": jobs.SOURCE})
