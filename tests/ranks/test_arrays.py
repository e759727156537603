# Arrays of other libraries through the public API between real ranks: torch's by DLPack, bfloat16 among them.
# Touches farandole.launch and the package as users see it.
"""A tensor as input gives a tensor of the same type as output; in place means in the tensor's own memory."""

from __future__ import annotations

import importlib.util

import jobs
import pytest
from world import ENGINES

ENGINE = {"native": {}, "python": {"FARANDOLE_ENGINE": "python"}}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_every_collective_takes_and_gives_tensors(engine: str) -> None:
    body = """
import torch
hvd.init()
failed = []
def check(what, found, expected):
    good = isinstance(found, torch.Tensor) and found.dtype == expected.dtype and torch.equal(found, expected)
    if not good: failed.append(f"{what}: {found}, not {expected}")
for kind in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
             torch.float16, torch.bfloat16, torch.float32, torch.float64):
    def tensor(*values): return torch.tensor(values, dtype=kind)
    mine = tensor(rank, 1, 0, 1)
    largest = tensor(1, 1, 0, 1)
    check("allreduce", hvd.allreduce(mine, op=hvd.Max), largest)
    check("grouped", hvd.grouped_allreduce([mine, mine], op=hvd.Max)[1], largest)
    check("allgather", hvd.allgather(mine[: rank + 1]), tensor(0, 1, 1))
    check("broadcast", hvd.broadcast(mine, 1), largest)
    check("alltoall", hvd.alltoall(mine), tensor(0, 1, 1, 1) if rank == 0 else tensor(0, 1, 0, 1))
    check("reducescatter", hvd.reducescatter(mine, op=hvd.Sum), tensor(1, 2) if rank == 0 else tensor(0, 2))
    if rank == 0:
        hvd.send(mine, 1)
    else:
        check("receive", hvd.recv(torch.zeros(4, dtype=kind), 0), tensor(0, 1, 0, 1))
    own = mine.clone()
    check("in place", hvd.allreduce_(own, op=hvd.Max), largest)
    check("in its own memory", own, largest)
    own = mine.clone()
    hvd.broadcast_(own, 1)
    check("broadcast in place", own, largest)
report(failed=failed)
hvd.shutdown()
"""
    assert jobs.run(body, 2, ["one", "two"], env=ENGINE[engine]) == [{"failed": []}] * 2
