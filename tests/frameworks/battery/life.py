# Cases: init and shutdown, process sets, objects, the basics.
# Touches binding.py and NumPy.
"""What scripts use besides the operations."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from farandole.engine.interface import DType

from .binding import ASYNC, BARRIER, Table, fails
from .values import everyones, rank_values

LIFE = Table()
case = LIFE.case


@case(init=None)
def nothing_works_before_init(b: Any, rank: int, size: int) -> None:
    assert not b.hvd.is_initialized()
    calls = (b.hvd.rank, b.hvd.size, b.hvd.local_rank, b.hvd.local_size, b.hvd.cross_rank, b.hvd.cross_size)
    for call in (*calls, b.hvd.is_homogeneous, lambda: b.hvd.start_timeline("nowhere"), b.hvd.stop_timeline):
        fails(ValueError, "Horovod has not been initialized; use hvd.init().", call)
    fails(ValueError, "Horovod has not been initialized; use hvd.init().", lambda: b.hvd.allreduce(b.tensor([1.0])))
    b.hvd.shutdown()  # without init it does nothing
    b.hvd.init()
    assert b.hvd.is_initialized()


@case()
def a_second_init_does_nothing(b: Any, rank: int, size: int) -> None:
    b.hvd.init()
    b.hvd.init(list(range(size)))
    assert (b.hvd.rank(), b.hvd.size()) == (rank, size)


@case()
def who_and_where(b: Any, rank: int, size: int) -> None:
    assert (b.hvd.rank(), b.hvd.size(), b.hvd.local_rank(), b.hvd.local_size()) == (rank, size, rank, size)
    assert (b.hvd.cross_rank(), b.hvd.cross_size(), b.hvd.is_homogeneous()) == (0, 1, True)


@case(init=None)
def what_is_inside_is_known_before_init(b: Any, rank: int, size: int) -> None:
    assert not b.hvd.mpi_built() and not b.hvd.mpi_enabled()
    assert b.hvd.gloo_built() and b.hvd.gloo_enabled()
    assert not b.hvd.ddl_built() and not b.hvd.ccl_built()
    assert isinstance(b.hvd.nccl_built(), int)
    assert {type(b.hvd.cuda_built()), type(b.hvd.rocm_built())} == {bool}
    fails(ValueError, "Horovod MPI is not enabled", b.hvd.mpi_threads_supported)
    ops = (b.hvd.Average, b.hvd.Sum, b.hvd.Adasum, b.hvd.Min, b.hvd.Max, b.hvd.Product)
    assert ops == (0, 1, 2, 3, 4, 5)
    b.hvd.init()


@case(init=None)
def process_sets_from_the_beginning(b: Any, rank: int, size: int) -> None:
    some, last = b.hvd.ProcessSet(range(size - 1)), b.hvd.ProcessSet([size - 1])
    assert (some.process_set_id, some.size(), some.included()) == (None, None, None)
    b.hvd.init(process_sets=[some, last])
    assert b.hvd.global_process_set.ranks == list(range(size))
    own_set = last if rank == size - 1 else some
    other_set = some if rank == size - 1 else last
    assert own_set.included() and not other_set.included()
    assert own_set.rank() == own_set.ranks.index(rank)
    assert own_set.size() == len(own_set.ranks)
    fails(ValueError, "", other_set.rank)
    members = own_set.ranks
    everything = everyones(size, 4)[members]
    tensor = b.tensor(rank_values(rank, 4))
    b.holds(b.hvd.allreduce(tensor, op=b.hvd.Sum, process_set=own_set), everything.sum(0))
    b.holds(b.hvd.allgather(tensor, process_set=own_set), everything.reshape(-1))
    b.holds(b.hvd.broadcast(tensor, members[-1], process_set=own_set), everything[-1])
    b.holds(b.hvd.grouped_allreduce([tensor], op=b.hvd.Sum, process_set=own_set)[0], everything.sum(0))
    exchanged = b.hvd.alltoall(b.tensor(rank_values(rank, len(members))), process_set=own_set)
    b.holds(exchanged, [rank_values(other, len(members))[own_set.rank()] for other in members])
    scattered = b.hvd.reducescatter(b.tensor(rank_values(rank, len(members))), op=b.hvd.Sum, process_set=own_set)
    b.holds(scattered, everyones(size, len(members))[members].sum(0)[own_set.rank() : own_set.rank() + 1])
    assert b.hvd.broadcast_object(rank, members[0], process_set=own_set) == members[0]
    fails(ValueError, "", lambda: b.hvd.allreduce(tensor, process_set=other_set))


@case(init={"process_sets": "Dynamic"})
def process_sets_with_handles_and_objects(b: Any, rank: int, size: int) -> None:
    most = b.hvd.add_process_set(b.hvd.ProcessSet(range(1, size)))
    assert most.process_set_id > 0 and most.mpi_comm is None
    if not most.included():
        assert most.size() == size - 1
        return
    everything = everyones(size, 2)[1:]
    for form in (b.hvd.allreduce_async, b.hvd.allreduce_async_) if ASYNC in b.offers else ():
        b.holds(
            b.hvd.synchronize(form(b.tensor(rank_values(rank, 2)), op=b.hvd.Sum, process_set=most)), everything.sum(0)
        )
    b.holds(b.hvd.grouped_allgather([b.tensor(rank_values(rank, 2))], process_set=most)[0], everything.reshape(-1))
    mean = b.hvd.allreduce(b.tensor(rank_values(0, 2) * (size - 1) * (rank == 1)), process_set=most)
    b.holds(mean, rank_values(0, 2))  # of the members, not of the job
    assert b.hvd.allgather_object(rank, process_set=most) == list(range(1, size))


@case(init=None)
def inits_that_cannot_be(b: Any, rank: int, size: int) -> None:
    class Comm:
        def Get_rank(self) -> int:
            return rank

    fails(ValueError, "", lambda: b.hvd.init(Comm()))
    fails(ValueError, "", lambda: b.hvd.init(process_sets=[b.hvd.ProcessSet([0]), b.hvd.ProcessSet([0])]))
    fails(ValueError, "", lambda: b.hvd.init(process_sets="static"))
    assert not b.hvd.is_initialized()
    b.hvd.init(list(range(size)), process_sets=[])


@case(BARRIER, init={"process_sets": "dynamic"})
def process_sets_come_and_go(b: Any, rank: int, size: int) -> None:
    ranks = list(range(size - 1))
    for _ in range(3):
        most = b.hvd.add_process_set(ranks[::-1])
        assert most.ranks == ranks and f"ranks={ranks}" in str(most)
        fails(ValueError, "", lambda: b.hvd.add_process_set(b.hvd.ProcessSet(ranks)))
        if most.included():
            result = b.hvd.allreduce(b.tensor([1.0]), op=b.hvd.Sum, process_set=most)
            b.holds(result, [size - 1])
            b.hvd.barrier(process_set=most)
        assert b.hvd.remove_process_set(most)
        assert most.process_set_id is None
        assert not b.hvd.remove_process_set(most)
        fails(ValueError, "", lambda: b.hvd.allreduce(b.tensor([1.0]), process_set=most))  # noqa: B023
    assert not b.hvd.remove_process_set(b.hvd.global_process_set)


@case()
def process_sets_that_cannot_be(b: Any, rank: int, size: int) -> None:
    fails(ValueError, "", lambda: b.hvd.ProcessSet(["zero"]))
    fails(ValueError, "process sets can only be added", lambda: b.hvd.add_process_set([0]))


@case()
def objects(b: Any, rank: int, size: int) -> None:
    thing = {"rank": rank, "numbers": list(range(1000 * (rank + 1)))}
    assert b.hvd.broadcast_object(thing, root_rank=1)["rank"] == 1
    assert b.hvd.broadcast_object(thing if rank == 0 else None, name="n")["numbers"] == list(range(1000))
    assert [found["rank"] for found in b.hvd.allgather_object(thing)] == list(range(size))
    assert b.hvd.allgather_object(None, name="nothing") == [None] * size


@case()
def a_timeline_has_the_names(b: Any, rank: int, size: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "timeline.json")
        b.hvd.start_timeline(path)
        b.hvd.allreduce(b.tensor([1.0]))
        for operation in (b.hvd.allreduce, b.hvd.allgather, b.hvd.alltoall, b.hvd.reducescatter):
            operation(b.tensor(np.ones(size)), name="seen")
        b.hvd.broadcast(b.tensor([1.0]), 0, name="seen")
        for grouped in (b.hvd.grouped_allreduce, b.hvd.grouped_allgather, b.hvd.grouped_reducescatter):
            grouped([b.tensor([1.0]), b.tensor([2.0])], name="group")
        b.hvd.stop_timeline()
        text = Path(path).read_text()
        json.loads(text)
        groups = ("grouped_allreduce", "grouped_allgather", "grouped_reducescatter")
        single = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")
        wanted = [f"{what}.seen" for what in single] + [f"{what}.group_{i}of2" for what in groups for i in (1, 2)]
        for name in (*wanted, "allreduce.noname."):
            assert name in text, f"no {name} in the timeline"


@case(ASYNC)
def shutdown_forgets_handles(b: Any, rank: int, size: int) -> None:
    old = b.hvd.allreduce_async(b.tensor([1.0]))
    b.hvd.synchronize(old)
    b.hvd.shutdown()
    b.hvd.init()
    fails(ValueError, "", lambda: b.hvd.poll(old))
    assert b.hvd.allreduce_async(b.tensor([1.0])) == 1
    b.holds(b.hvd.synchronize(1), [1.0])


@case()
def many_steps_with_the_same_names(b: Any, rank: int, size: int) -> None:
    for step in range(30):
        for index in range(5):
            tensor = b.tensor(np.full(10, rank + step + index), DType.FLOAT32)
            expected = np.full(10, size * (size - 1) / 2 + size * (step + index))
            b.holds(b.hvd.allreduce(tensor, name=f"layer{index}", op=b.hvd.Sum), expected)
