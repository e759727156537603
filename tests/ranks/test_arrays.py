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


@pytest.mark.parametrize("engine", ENGINES)
def test_a_repeated_call_takes_whatever_array_comes_next(engine: str) -> None:
    body = """
import threading
hvd.init()
failed = []
def check(what, found, expected):
    if not (type(found) is np.ndarray and found.dtype == expected.dtype and np.array_equal(found, expected)):
        failed.append(f"{what}: {found!r}, not {expected!r}")
def both(what, array, expected):
    before = array.copy()
    check(what, hvd.allreduce(array, op=hvd.Sum, name="x"), expected)
    check(what + ", input", array, before)
    given = hvd.allreduce_(array, op=hvd.Sum, name="y")
    check(what + ", in place", array, expected)
    if given is not array: failed.append(f"{what}: another array is given back")
# The same names again and again: other types, shapes and memory must not be taken for the first one's.
for turn in range(3):
    for kind in "? b B h H i l e f d".split():
        one = np.array([[1, 0], [1, rank]], kind)
        both(kind, one, (one + np.array([[1, 0], [1, 1 - rank]], kind)).astype(kind))
    both("other shape", np.full((3, 1), rank, "f"), np.ones((3, 1), "f"))
    both("no dimension", np.array(rank + 1.0), np.array(3.0))
    both("empty", np.zeros((0, 4)), np.zeros((0, 4)))
    whole = np.zeros(6) + rank
    hvd.allreduce_(whole[1:4], op=hvd.Sum, name="y")
    check("a part", whole, np.array([rank, 1, 1, 1, rank, rank], float))
def refused(kind, what, array):
    for name, call in (("x", hvd.allreduce), ("y", hvd.allreduce_)):
        try: call(array, op=hvd.Sum, name=name)
        except kind as error:
            if what not in str(error): failed.append(f"{error}, not {what}")
        else:
            if (name, what) != ("x", "read-only"): failed.append(f"{what} is not refused")
refused(ValueError, "not contiguous", np.zeros((4, 4)).T)
refused(ValueError, "not supported", np.zeros(2, "c16"))
frozen = np.ones(2)
frozen.flags.writeable = False
refused(ValueError, "read-only", frozen)
# A mismatch of a known call is an error on both ranks, and the next call works.
try: hvd.allreduce_(np.ones(2 + rank), op=hvd.Sum, name="y")
except hvd.HorovodInternalError: pass
else: failed.append("no error for different shapes")
both("after an error", np.ones(2), np.full(2, 2.0))
# Threads of one process share what is known of a name's first call.
def many(number):
    for turn in range(50): check("thread", hvd.allreduce_(np.full(4, number + turn), name=f"t{number}", op=hvd.Sum),
                                 np.full(4, 2 * (number + turn)))
threads = [threading.Thread(target=many, args=(number,)) for number in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
report(failed=failed)
hvd.shutdown()
"""
    assert jobs.run(body, 2, ["one", "two"], env=ENGINE[engine]) == [{"failed": []}] * 2
