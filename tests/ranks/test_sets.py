# Process sets through the public API between real ranks: static and dynamic, and the errors when ranks make mistakes.
# Touches farandole.launch and the package as users see it.
"""Sets given to init, sets added and removed later, sets that only their members use."""

from __future__ import annotations

import jobs
import pytest
from world import ENGINES

ENGINE = {"native": {}, "python": {"FARANDOLE_ENGINE": "python"}}
REFUSED = """
def refused(call, kind=ValueError):
    try:
        call()
    except kind:
        return True
    return False
"""


@pytest.mark.parametrize("engine", ENGINES)
def test_static_sets(engine: str) -> None:
    body = (
        REFUSED
        + """
pair, rest = hvd.ProcessSet([2, 0]), hvd.ProcessSet([1])
hvd.init(process_sets=[pair, rest])
mine, other = (rest, pair) if rank == 1 else (pair, rest)
report(ids=[pair.process_set_id, rest.process_set_id], size=mine.size(), place=mine.rank(),
       included=[mine.included(), other.included()],
       sum=float(hvd.allreduce(np.array([rank + 1.0]), op=hvd.Sum, process_set=mine)[0]),
       refused=[refused(lambda: hvd.allreduce(np.ones(1), process_set=other)), refused(other.rank),
                refused(lambda: hvd.broadcast(np.ones(1), other.ranks[0], process_set=mine)),
                refused(lambda: hvd.add_process_set([0, 1])), refused(lambda: hvd.remove_process_set(pair))],
       all=float(hvd.allreduce(np.ones(1), op=hvd.Sum)[0]))
hvd.shutdown()
assert pair.process_set_id is None and pair.size() is None
"""
    )
    found = jobs.run(body, 3, ["one", "one", "two"], env=ENGINE[engine])
    for rank, report in enumerate(found):
        member = {"size": 1, "place": 0, "sum": 2.0} if rank == 1 else {"size": 2, "place": rank // 2, "sum": 4.0}
        assert {key: report[key] for key in member} == member
        assert report["ids"] == [1, 2] and report["included"] == [True, False] and report["all"] == 3.0
        assert report["refused"] == [True] * 5


@pytest.mark.parametrize("engine", ENGINES)
def test_dynamic_sets(engine: str) -> None:
    body = (
        REFUSED
        + """
hvd.init(process_sets="DYNAMIC")
for turn in range(3):
    pair = hvd.add_process_set([0, 1])
    again = refused(lambda: hvd.add_process_set([1, 0]))
    odd = refused(lambda: hvd.add_process_set([0, 2] if rank == 2 else [1, 2]), Mismatch)
    total = float(hvd.allreduce(np.ones(1), op=hvd.Sum, process_set=pair)[0]) if rank < 2 else 2.0
    gone = hvd.remove_process_set(pair)
    late = refused(lambda: hvd.allreduce(np.ones(1), process_set=pair))
    assert (again, odd, total, gone, late) == (True, True, 2.0, True, True), (again, odd, total, gone, late)
    assert hvd.remove_process_set(pair) is False
report(sum=float(hvd.allreduce(np.ones(1), op=hvd.Sum)[0]))
hvd.shutdown()
"""
    )
    assert jobs.run(body, 3, env=ENGINE[engine]) == [{"sum": 3.0}] * 3


@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_that_give_init_different_sets_all_get_an_error(engine: str) -> None:
    body = (
        REFUSED
        + """
wrong = refused(lambda: hvd.init(process_sets=[[0, rank]] if rank else [[0, 1]]), HorovodInternalError)
report(wrong=wrong, initialized=hvd.is_initialized())
"""
    )
    assert jobs.run(body, 3, env=ENGINE[engine]) == [{"wrong": True, "initialized": False}] * 3


@pytest.mark.parametrize("engine", ENGINES)
def test_links_that_a_large_job_makes_on_demand(engine: str) -> None:
    """By the rules of a job beyond 64 ranks and 32 hosts, with six of each: ranks 1 and 4 begin without a link."""
    body = """
from farandole.rendezvous import links
links.FULL_MESH_RANKS = links.ALL_PAIRS_HOSTS = 1
assert 4 not in links.initial_links(1, list(range(6)))[1]
pair = hvd.ProcessSet([1, 4])
hvd.init(process_sets=[pair])
assert rank not in pair.ranks or hvd.allreduce(np.ones(3), op=hvd.Sum, process_set=pair)[0] == 2
sums = [float(hvd.allreduce(np.full(count, 1.0), op=hvd.Sum, name=f"n{count}")[-1]) for count in (1, 300_000)]
gathered = hvd.allgather(np.array([rank])).tolist()
if rank == 1: hvd.send(np.array([7]), 4)
received = int(hvd.recv(np.zeros(1, np.int64), 1)[0]) if rank == 4 else 7
swapped = hvd.alltoall(np.arange(6) + 10 * rank).tolist()
report(sums=sums, gathered=gathered, received=received, swapped=swapped == [10 * r + rank for r in range(6)])
hvd.shutdown()
"""
    expected = {"sums": [6.0, 6.0], "gathered": list(range(6)), "received": 7, "swapped": True}
    assert jobs.run(body, 6, list("abcdef"), env=ENGINE[engine]) == [expected] * 6


FOUNDED = """
import os, resource, time
from farandole.engine.interface import DType, Kind, ReduceOp, Request
from farandole.world.runtime import runtime

def found():
    engine = runtime.world.engine
    [handle] = engine.submit([Request(Kind.ADD_GROUP, splits=[2, 0, 1], tag=(1 << 20) + 5)], prompt=True)
    engine.wait(handle)

def use():
    engine, ones = runtime.world.engine, np.ones(1, dtype=np.float32)
    request = Request(Kind.ALLREDUCE, "x", op=ReduceOp.SUM, group=(1 << 20) + 5, input=ones, output=ones)
    request.dtype = DType.FLOAT32
    [handle] = engine.submit([request], prompt=True)
    engine.wait(handle)

def error(call):
    try:
        call()
    except Exception as error:
        return str(error)
    return ""
"""


def test_all_members_get_the_error_when_one_cannot_create_a_group() -> None:
    body = """
hvd.init()
if rank == 1:
    used = max(int(number) for number in os.listdir("/proc/self/fd")) + 1
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, before[1]))
    fillers = []
    while True:
        try:
            fillers.append(os.dup(0))
        except OSError:
            break
    said = error(found)
    for filler in fillers:
        os.close(filler)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
hvd.allreduce(np.ones(1))  # a descriptor that came while none was left would be lost, and the world with it
if rank == 0:
    said = error(found) or error(use)
report(said=said)
hvd.allreduce(np.ones(1))  # the world goes on
hvd.shutdown()
"""
    zero, one = jobs.run(FOUNDED + body, 2)
    assert "too few file descriptors" in one["said"], one
    assert "rank 1 could not make process set" in zero["said"], zero


def test_an_operation_names_the_member_that_has_left() -> None:
    body = """
hvd.init()
if rank == 1:
    hvd.shutdown()
    report(said="")
else:
    try:
        hvd.allreduce(np.ones(1), name="until it has left")
    except Exception:
        pass
    report(said=error(found) or error(use))
"""
    zero, _ = jobs.run(FOUNDED + body, 2)
    assert "rank 1 has been shut down" in zero["said"], zero
