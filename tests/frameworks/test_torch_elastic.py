# Elastic training with PyTorch in real processes.
# Touches farandole.launch, torch_elastic_cases.py and torch_virtual_cases.py.
"""State on ranks that stay; the same bits on 1 to 4 ranks."""

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


def run(script: str, ranks: int, scratch: Path, hosts: Any = None) -> list[str]:
    """What each rank printed."""
    command = [sys.executable, str(HERE / script)]
    # torch keeps a cache of compiled code, even an empty one: it goes where the test cleans up.
    environment = {**ENVIRONMENT, "SCRATCH": str(scratch), "TORCHINDUCTOR_CACHE_DIR": str(scratch / "cache")}
    with local.start(command, ranks, hosts, env=environment, stop_on_failure=False) as job:
        job.wait(100)
        output = [f"rank {rank}: {job.stdout(rank)[-4000:]} {job.stderr(rank)[-2000:]}" for rank in range(ranks)]
        assert list(job.codes) == [0] * ranks, "\n".join(output).replace("\\n", "\n")
        return [job.stdout(rank) for rank in range(ranks)]


@pytest.mark.ranks
@pytest.mark.parametrize("hosts", [["a", "a"], ["a", "b", "b"]], ids=["one host", "two hosts"])
def test_state_on_ranks_that_stay(hosts: list[str], tmp_path: Path) -> None:
    for words in run("torch_elastic_cases.py", len(hosts), tmp_path, hosts):
        print(words)
        found = json.loads(words.splitlines()[-1])
        assert found.pop("left behind") == 0
        assert {name: result for name, result in found.items() if result != "ok"} == {}


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 3), pytest.param((1, 2, 3, 4), marks=pytest.mark.nightly)], ids=str)
def test_row_26_the_same_bits_on_any_number_of_ranks(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    digests: dict[str, set[str]] = {}
    for ranks in sizes:
        for words in run("torch_virtual_cases.py", ranks, tmp_path):
            found = json.loads(words.splitlines()[-1])
            for model, digest in found["digests"].items():
                digests.setdefault(model, set()).add(digest)
        print(f"{ranks} ranks: {json.dumps(found['cost'])}")
    assert set(digests) == {"mlp", "cnn", "transformer"}
    assert {model: len(found) for model, found in digests.items()} == dict.fromkeys(digests, 1)
