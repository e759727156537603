# torch.distributed on Farandole with an older torch, in an environment that `make test` has made.
# Touches farandole.launch and the cases.
"""The newest torch is what the other tests run on; this one is what users who cannot move have."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
HERE = Path(__file__).parent
PYTHON = HERE.parents[1] / "build" / "older-torch" / "bin" / "python"
sys.path.insert(0, str(HERE))

import distributed_cases  # noqa: E402
import distributed_job  # noqa: E402

# Of that module alone, whoever has imported others before; and torch checks more bad input than it did.
SHARED = {name for name, case in distributed_job.CASES.items() if case.__module__ == distributed_cases.__name__}
CASES = sorted(SHARED - {"bad_input"})
from distributed_runs import run, same  # noqa: E402

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(
        not PYTHON.exists(), reason="no older torch: scripts/environment.py older makes it, on Arm alone"
    ),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("older")
    # Gloo of the newer torch: the older one's ends the process when its input is bad.
    gloo = run("distributed_cases", "gloo", 2, folder / "gloo")
    return {"gloo": gloo, "farandole": run("distributed_cases", "farandole", 2, folder / "ours", python=str(PYTHON))}


@pytest.mark.parametrize("name", CASES)
def test_as_on_gloo(found: dict[str, list[dict[str, Any]]], name: str) -> None:
    same(found, name)


@pytest.mark.parametrize("module", ["distributed_own_cases", "distributed_training_cases"])
def test_what_gloo_has_not_and_training(tmp_path: Path, module: str) -> None:
    for rank, found in enumerate(run(module, "farandole", 2, tmp_path / module, python=str(PYTHON))):
        for name, result in found.items():
            assert not isinstance(result, str), f"rank {rank}, {name}: {result}"
