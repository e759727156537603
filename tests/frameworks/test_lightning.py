# Lightning with our strategy: the same results as its own DDP with Gloo, features that only ours has, ranks that die.
# Touches farandole.launch and Lightning, in separate processes: importing Lightning takes seconds.
"""Many cases run in few jobs (lightning_cases.py, lightning_own_cases.py); each is a test here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning_results import check_and_return_world_sizes

from farandole.launch import local

pytest.importorskip("torch")
pytest.importorskip("lightning_utilities", reason="Lightning is not installed")
HERE = Path(__file__).parent
PATH = f"{HERE.parents[1] / 'src'}:{HERE}"
UNUSED = "scipy sklearn matplotlib pandas mpi4py"  # Lightning can do without them; mpi4py would start MPI

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(300)]


def case_names(file: str, decorator: str) -> list[str]:
    """The functions of a file that have this decorator, without importing Lightning."""
    return re.findall(rf"^@{decorator}\ndef (\w+)", (HERE / file).read_text(), flags=re.MULTILINE)


def job(kind: str, ranks: int, scratch: Path) -> list[dict[str, Any]]:
    """The results of the cases, by rank."""
    environment = {"PYTHONPATH": PATH, "TESTS_WITHOUT": UNUSED, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {"SCRATCH": str(scratch), "TMPDIR": str(scratch), "TORCHINDUCTOR_CACHE_DIR": str(scratch)}
    with local.start([sys.executable, str(HERE / "lightning_job.py"), kind], ranks, env=environment) as started:
        code = started.wait(280)
        errors = "\n".join(started.stderr(rank)[-3000:] for rank in range(ranks))
        assert code == 0, errors
    return [json.loads((scratch / f"{kind}-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return job("compared", 2, tmp_path_factory.mktemp("compared"))


@pytest.fixture(scope="module")
def without_ddp_equivalent(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return job("own", 3, tmp_path_factory.mktemp("own"))


@pytest.mark.parametrize("name", case_names("lightning_cases.py", "case"))
def test_same_results_as_ddp(compared: list[dict[str, Any]], name: str) -> None:
    for rank, result in enumerate(compared):
        assert result[name] is None, f"rank {rank}: {result[name]}"


@pytest.mark.parametrize("name", case_names("lightning_own_cases.py", "own"))
def test_features_without_a_ddp_equivalent(without_ddp_equivalent: list[dict[str, Any]], name: str) -> None:
    for rank, result in enumerate(without_ddp_equivalent):
        assert result[name] is None, f"rank {rank}: {result[name]}"


def test_ranks_die_and_come_back(tmp_path: Path) -> None:
    """Rank 1 dies in the first epoch, rank 0 in a later one: every sample is used once per epoch.

    The logger has written one run, not one for each restart.
    """
    environment = {**os.environ, "PYTHONPATH": PATH, "TESTS_WITHOUT": UNUSED}
    environment |= {"OMP_NUM_THREADS": "1", "SCRATCH": str(tmp_path)}
    command = [sys.executable, "-m", "farandole", "run", "-np", "3", "--min-np", "1", sys.executable]
    command.append(str(HERE / "lightning_elastic_job.py"))
    (tmp_path / "tmp").mkdir()
    environment["TMPDIR"] = str(tmp_path / "tmp")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-5000:]
    sizes = check_and_return_world_sizes(tmp_path, ["first", "second"])
    assert sizes[0] == 3 and 2 in sizes and 1 in sizes and sizes[-1] == 3, sizes
