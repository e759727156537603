# Cases at the edges: sets that are all ranks, tensors without dimensions or elements, types and devices that cannot be.
# Touches binding.py, errors and NumPy.
"""A table for every framework of what Horovod's programs may rely on there."""

from __future__ import annotations

from typing import Any

import numpy as np

from farandole.base.errors import HorovodInternalError
from farandole.engine.interface import DType

from .binding import Table, fails
from .mistakes import check_allreduce

EDGES = Table()
case = EDGES.case

REFUSES_SCALARS = ("allgather", "alltoall", "reducescatter")
REFUSE_GROUPS_OF_SCALARS = ("grouped_allgather", "grouped_reducescatter")


@case(init={"process_sets": "dynamic"})
def a_set_of_all_ranks_is_there_already(b: Any, rank: int, size: int) -> None:
    everyone = list(range(size))
    for ranks in (everyone, everyone[::-1], b.hvd.ProcessSet(everyone)):
        message = f"a process set with the ranks {everyone} is already registered"
        fails(ValueError, message, lambda: b.hvd.add_process_set(ranks))  # noqa: B023
    check_allreduce(b, size)
    some = b.hvd.add_process_set([0])
    fails(ValueError, "a process set with the ranks [0] is already", lambda: b.hvd.add_process_set([0]))
    assert b.hvd.remove_process_set(b.hvd.global_process_set) is False and b.hvd.remove_process_set(some) is True
    check_allreduce(b, size)


@case()
def tensors_without_dimensions(b: Any, rank: int, size: int) -> None:
    total = size * (size + 1) / 2
    table = {b.hvd.Sum: total, b.hvd.Average: total / size, b.hvd.Min: 1.0, b.hvd.Max: size}
    for op, wanted in table.items():
        b.holds(b.hvd.allreduce(b.tensor(rank + 1.0), op=op), wanted)
        one, two = b.hvd.grouped_allreduce([b.tensor(rank + 1.0), b.tensor([rank + 1.0])], op=op)
        b.holds(one, wanted)
        b.holds(two, [wanted])
    for root in range(size):
        b.holds(b.hvd.broadcast(b.tensor(float(rank)), root), root)
    for kind in (DType.INT64, DType.FLOAT16):
        b.holds(b.hvd.allreduce(b.tensor(1, kind), op=b.hvd.Sum), size, kind)
    for name in REFUSES_SCALARS:
        fails((ValueError, HorovodInternalError), "", lambda: getattr(b.hvd, name)(b.tensor(1.0)))  # noqa: B023
        check_allreduce(b, size)
    for name in REFUSE_GROUPS_OF_SCALARS:
        group = [b.tensor([1.0] * size), b.tensor(1.0)]
        fails((ValueError, HorovodInternalError), "", lambda: getattr(b.hvd, name)(group))  # noqa: B023
        check_allreduce(b, size)


@case()
def tensors_without_elements(b: Any, rank: int, size: int) -> None:
    for shape in ((0,), (0, 3), (3, 0), (2, 0, 4)):
        nothing = np.zeros(shape)
        for op in (b.hvd.Sum, b.hvd.Average, b.hvd.Max):
            b.holds(b.hvd.allreduce(b.tensor(nothing), op=op), nothing)
        empty, full = b.hvd.grouped_allreduce([b.tensor(nothing), b.tensor([1.0, 2.0])], op=b.hvd.Sum)
        b.holds(empty, nothing)
        b.holds(full, [size, 2 * size])
        b.holds(b.hvd.broadcast(b.tensor(nothing), size - 1), nothing)
        b.holds(b.hvd.allgather(b.tensor(nothing)), np.zeros((shape[0] * size, *shape[1:])))
        rows = np.zeros((shape[0] * size, *shape[1:]))
        b.holds(b.hvd.alltoall(b.tensor(rows)), rows)
        b.holds(b.hvd.reducescatter(b.tensor(rows)), nothing)
    check_allreduce(b, size)


@case()
def types_that_cannot_be_sent(b: Any, rank: int, size: int) -> None:
    good = b.tensor([1.0] * size)
    for reason, tensor in b.unusable().items():
        for name in ("grouped_allreduce", "grouped_allgather", "grouped_reducescatter"):
            try:
                fails(ValueError, "", lambda: getattr(b.hvd, name)([good, tensor]))  # noqa: B023
            except AssertionError as error:
                raise AssertionError(f"{reason}, {name}: {error}") from None
        fails(ValueError, "", lambda: b.hvd.broadcast(tensor, 0))  # noqa: B023
    check_allreduce(b, size)
