# Jobs of distributed_job.py, and the comparison of the results of two backends.
# Touches farandole.launch and torch.
"""`run` gives the results of every rank; `same` compares one case of two runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import distributed_job
import torch

from farandole.launch import local

HERE = Path(__file__).parent
SOURCE = str(HERE.parents[1] / "src")


def run(
    module: str,
    backend: str,
    ranks: int,
    folder: Path,
    seconds: float = 150,
    python: str = sys.executable,
    way: tuple[str, ...] = (),
    **more: str,
) -> list[dict[str, Any]]:
    """`way`: more arguments of the job. `more`: variables of the ranks."""
    folder.mkdir()
    command = [python, str(HERE / "distributed_job.py"), module, backend, str(folder), *way]
    environment = {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **more}
    if way:
        environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder)  # torch makes it, even an empty one
    with local.start(command, ranks, env=environment, stop_on_failure=False) as job:
        job.wait(seconds)
        output = "\n".join(f"rank {rank}: {job.stderr(rank)[-3000:]}" for rank in range(ranks))
        assert list(job.codes) == [0] * ranks, output
    return [torch.load(folder / str(rank), weights_only=False) for rank in range(ranks)]


def compare(first: Any, other: Any, exact: bool) -> None:
    if isinstance(first, torch.Tensor):
        half = first.dtype in (torch.float16, torch.bfloat16)
        allowed = 0.0 if exact else 0.02 if half else None  # the order of a sum is each library's own
        tolerance: dict[str, Any] = {} if allowed is None else {"rtol": allowed, "atol": allowed}
        torch.testing.assert_close(first, other, equal_nan=True, **tolerance)
    elif isinstance(first, list | tuple):
        assert len(first) == len(other)
        for index, (one, two) in enumerate(zip(first, other, strict=True)):
            try:
                compare(one, two, exact)
            except AssertionError as error:
                raise AssertionError(f"[{index}] {error}") from None
    elif isinstance(first, dict):
        compare(sorted(first.items()), sorted(other.items()), exact)
    else:
        assert first == other


def same(found: dict[str, list[dict[str, Any]]], name: str) -> None:
    for rank, (first, other) in enumerate(zip(found["farandole"], found["gloo"], strict=True)):
        for backend, result in (("farandole", first[name]), ("gloo", other[name])):
            assert not isinstance(result, str), f"rank {rank} on {backend}: {result}"
        try:
            compare(first[name], other[name], name not in distributed_job.CLOSE)
        except AssertionError as error:
            raise AssertionError(f"rank {rank}, farandole against gloo: {error}") from None
