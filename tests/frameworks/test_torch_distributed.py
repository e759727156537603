# torch.distributed on Farandole against the same cases on Gloo.
# Touches farandole.launch, the cases and torch.
"""PyTorch's own behaviour is the oracle: equal bits for copies and whole numbers, rounding for sums."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from farandole.launch import local

torch = pytest.importorskip("torch")
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import distributed_cases  # noqa: E402, F401
import distributed_job  # noqa: E402

SHARED = list(distributed_job.CASES)
import distributed_own_cases  # noqa: E402, F401

OWN = [name for name in distributed_job.CASES if name not in SHARED]
import distributed_training_cases  # noqa: E402, F401

TRAINING = [name for name in distributed_job.CASES if name not in SHARED + OWN]
SOURCE = str(HERE.parents[1] / "src")
pytestmark = pytest.mark.ranks


def run(module: str, backend: str, ranks: int, folder: Path, seconds: float = 100) -> list[dict[str, Any]]:
    folder.mkdir()
    command = [sys.executable, str(HERE / "distributed_job.py"), module, backend, str(folder)]
    environment = {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCHINDUCTOR_CACHE_DIR": str(folder)}
    with local.start(command, ranks, env=environment, stop_on_failure=False) as job:
        job.wait(seconds)
        said = "\n".join(f"rank {rank}: {job.stderr(rank)[-3000:]}" for rank in range(ranks))
        assert list(job.codes) == [0] * ranks, said
    return [torch.load(folder / str(rank), weights_only=False) for rank in range(ranks)]


def compare(mine: Any, other: Any, exact: bool) -> None:
    if isinstance(mine, torch.Tensor):
        tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {}
        torch.testing.assert_close(mine, other, equal_nan=True, **tolerance)
    elif isinstance(mine, list | tuple):
        assert len(mine) == len(other)
        for place, (one, two) in enumerate(zip(mine, other, strict=True)):
            try:
                compare(one, two, exact)
            except AssertionError as error:
                raise AssertionError(f"[{place}] {error}") from None
    elif isinstance(mine, dict):
        compare(sorted(mine.items()), sorted(other.items()), exact)
    else:
        assert mine == other


@pytest.fixture(scope="module", params=[2, 3], ids=lambda size: f"{size} ranks")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("distributed")
    return {name: run("distributed_cases", name, request.param, folder / name) for name in ("gloo", "farandole")}


def same(found: dict[str, list[dict[str, Any]]], name: str) -> None:
    for rank, (mine, other) in enumerate(zip(found["farandole"], found["gloo"], strict=True)):
        for backend, result in (("farandole", mine[name]), ("gloo", other[name])):
            assert not isinstance(result, str), f"rank {rank} on {backend}: {result}"
        try:
            compare(mine[name], other[name], name not in distributed_job.CLOSE)
        except AssertionError as error:
            raise AssertionError(f"rank {rank}, farandole against gloo: {error}") from None


@pytest.mark.parametrize("name", SHARED)
def test_as_on_gloo(found: dict[str, list[dict[str, Any]]], name: str) -> None:
    same(found, name)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("distributed")
    return {name: run("distributed_training_cases", name, 2, folder / name) for name in ("gloo", "farandole")}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINING)
def test_training_as_on_gloo(trained: dict[str, list[dict[str, Any]]], name: str) -> None:
    same(trained, name)


@pytest.fixture(scope="module", params=[2, 3], ids=lambda size: f"{size} ranks")
def own(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run("distributed_own_cases", "farandole", request.param, tmp_path_factory.mktemp("distributed") / "own")


@pytest.mark.parametrize("name", OWN)
def test_beyond_gloo(own: list[dict[str, Any]], name: str) -> None:
    for rank, result in enumerate(own):
        assert result[name] is None, f"rank {rank}: {result[name]}"
