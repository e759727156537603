# Cases: every operation gives the right values, in every type and form.
# Touches binding.py and NumPy.
"""The values are small whole numbers, so that every type holds them exactly and the order of sums does not matter."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from farandole.engine.interface import Array, DType

from .binding import ASYNC, BARRIER, FLOATS, GRADIENTS, IN_PLACE, JOIN, NUMBERS, Table

VALUES = Table()
case = VALUES.case


def rank_values(rank: int, *shape: int) -> Array:
    """A rank's contribution: 1, 2, 3, 1, 2, 3, ... times (rank + 1)."""
    return (np.arange(np.prod(shape, dtype=int)) % 3 + 1).reshape(shape) * (rank + 1)


def everyones(size: int, *shape: int) -> Array:
    return np.stack([rank_values(rank, *shape) for rank in range(size)])


@case()
def allreduce_in_every_type(b: Any, rank: int, size: int) -> None:
    for dtype in b.dtypes:
        if dtype not in NUMBERS:
            continue
        everything = everyones(size, 2, 3)
        for op, expected in (
            (b.hvd.Sum, everything.sum(0)),
            (b.hvd.Min, everything.min(0)),
            (b.hvd.Max, everything.max(0)),
            (b.hvd.Product, everything.prod(0)),
        ):
            b.holds(b.hvd.allreduce(b.tensor(rank_values(rank, 2, 3), dtype), op=op), expected, dtype)
        for even in (b.hvd.Average, None):
            result = b.hvd.allreduce(b.tensor(rank_values(0, 2, 3) * 2 * rank, dtype), op=even)
            b.holds(result, rank_values(0, 2, 3) * (size - 1), dtype)


@case()
def allreduce_of_truth_values(b: Any, rank: int, size: int) -> None:
    if DType.BOOL in b.dtypes:
        local = b.tensor([rank == 0, True, False], DType.BOOL)
        b.holds(b.hvd.allreduce(local, op=b.hvd.Max), [True, True, False], DType.BOOL)
        b.holds(b.hvd.allreduce(local, op=b.hvd.Min), [False, True, False], DType.BOOL)


@case()
def allreduce_of_every_size(b: Any, rank: int, size: int) -> None:
    for shape in ((), (0,), (1,), (0, 3), (7, 1, 2), (1000,), (300_001,)):
        b.holds(b.hvd.allreduce(b.tensor(rank_values(rank, *shape)), op=b.hvd.Sum), everyones(size, *shape).sum(0))


@case()
def allreduce_leaves_its_input(b: Any, rank: int, size: int) -> None:
    tensor = b.tensor(rank_values(rank, 4))
    b.hvd.allreduce(tensor, op=b.hvd.Sum)
    b.holds(tensor, rank_values(rank, 4))


@case()
def allreduce_with_scales(b: Any, rank: int, size: int) -> None:
    for dtype in (dtype for dtype in FLOATS if dtype in b.dtypes):
        tensor = b.tensor(rank_values(rank, 5), dtype)
        result = b.hvd.allreduce(tensor, op=b.hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
        b.holds(result, everyones(size, 5).sum(0) * 2, dtype)


@case()
def allreduce_with_compression(b: Any, rank: int, size: int) -> None:
    for compression in (b.hvd.Compression.none, b.hvd.Compression.fp16):
        result = b.hvd.allreduce(b.tensor(rank_values(rank, 5)), op=b.hvd.Sum, compression=compression)
        b.holds(result, everyones(size, 5).sum(0), DType.FLOAT32)


@case()
def adasum_of_equal_and_of_orthogonal_tensors(b: Any, rank: int, size: int) -> None:
    b.holds(b.hvd.allreduce(b.tensor([1.0, 2.0, 3.0]), op=b.hvd.Adasum), [1, 2, 3], DType.FLOAT32)
    unit = np.eye(size)[rank]
    b.holds(b.hvd.allreduce(b.tensor(unit), op=b.hvd.Adasum), np.ones(size), DType.FLOAT32)


@case(IN_PLACE)
def allreduce_in_place(b: Any, rank: int, size: int) -> None:
    for dtype in (dtype for dtype in NUMBERS if dtype in b.dtypes):
        tensor = b.tensor(rank_values(rank, 4), dtype)
        assert b.same(b.hvd.allreduce_(tensor, op=b.hvd.Sum), tensor)
        b.holds(tensor, everyones(size, 4).sum(0), dtype)


@case(ASYNC)
def allreduce_behind_handles(b: Any, rank: int, size: int) -> None:
    names = [f"t{index}" for index in range(20)]
    order = names if rank % 2 else names[::-1]
    handles = {
        name: b.hvd.allreduce_async(b.tensor(rank_values(rank, 3) + int(name[1:])), name=name, op=b.hvd.Sum)
        for name in order
    }
    for name in names:
        expected = everyones(size, 3).sum(0) + size * int(name[1:])
        b.holds(b.hvd.synchronize(handles[name]), expected)


@case(ASYNC)
def unnamed_operations_pair_up_by_their_order(b: Any, rank: int, size: int) -> None:
    handles = [b.hvd.allreduce_async(b.tensor([float(index)]), op=b.hvd.Sum) for index in range(10)]
    for index, handle in reversed(list(enumerate(handles))):
        b.holds(b.hvd.synchronize(handle), [index * size])


@case(ASYNC)
def handles_count_from_one_and_are_known_until_taken(b: Any, rank: int, size: int) -> None:
    first = b.hvd.allreduce_async(b.tensor([1.0]))
    second = b.hvd.broadcast_async(b.tensor([1.0]), 0)
    assert (first, second) == (1, 2)
    for handle in (second, first):
        while not b.hvd.poll(handle):
            pass
        assert b.hvd.synchronize(handle) is not None
        assert b.hvd.synchronize(handle) is None


@case(ASYNC, IN_PLACE)
def asynchronous_in_place(b: Any, rank: int, size: int) -> None:
    tensor, other = b.tensor(rank_values(rank, 3)), b.tensor(rank_values(rank, 3))
    handles = [b.hvd.allreduce_async_(tensor, op=b.hvd.Sum), b.hvd.broadcast_async_(other, size - 1)]
    assert b.same(b.hvd.synchronize(handles[0]), tensor)
    assert b.same(b.hvd.synchronize(handles[1]), other)
    b.holds(tensor, everyones(size, 3).sum(0))
    b.holds(other, rank_values(size - 1, 3))


@case()
def grouped_allreduce_of_mixed_types(b: Any, rank: int, size: int) -> None:
    dtypes = [dtype for dtype in (DType.FLOAT32, DType.BFLOAT16, DType.INT64) if dtype in b.dtypes]
    tensors = [b.tensor(rank_values(rank, count), dtype) for count, dtype in enumerate(dtypes, 1)]
    for name in (None, "group"):
        for index, result in enumerate(b.hvd.grouped_allreduce(tensors, name=name, op=b.hvd.Sum)):
            b.holds(result, everyones(size, index + 1).sum(0), dtypes[index])


@case(ASYNC, IN_PLACE)
def grouped_allreduce_in_all_its_forms(b: Any, rank: int, size: int) -> None:
    def fresh() -> list[Any]:
        return [b.tensor(rank_values(rank, count)) for count in (1, 4, 2)]

    def check(results: Any) -> None:
        assert isinstance(results, tuple)
        for result, count in zip(results, (1, 4, 2), strict=True):
            b.holds(result, everyones(size, count).sum(0))

    check(b.hvd.synchronize(b.hvd.grouped_allreduce_async(fresh(), name="a", op=b.hvd.Sum)))
    for wait in (False, True):
        tensors = fresh()
        if wait:
            results = b.hvd.grouped_allreduce_(tensors, op=b.hvd.Sum)
        else:
            results = b.hvd.synchronize(b.hvd.grouped_allreduce_async_(tensors, op=b.hvd.Sum))
        check(results)
        assert all(b.same(result, tensor) for result, tensor in zip(results, tensors, strict=True))


@case()
def allgather_in_every_type(b: Any, rank: int, size: int) -> None:
    for dtype in b.dtypes:
        local = np.full((rank + 1, 2), rank % 2)
        expected = np.concatenate([np.full((other + 1, 2), other % 2) for other in range(size)])
        b.holds(b.hvd.allgather(b.tensor(local, dtype)), expected, dtype)


@case()
def the_deprecated_argument_in_every_form(b: Any, rank: int, size: int) -> None:
    forms = [b.hvd.allreduce]
    if IN_PLACE in b.offers:
        forms.append(b.hvd.allreduce_)
    if ASYNC in b.offers:
        forms.append(lambda tensor, **more: b.hvd.synchronize(b.hvd.allreduce_async(tensor, **more)))
        forms.append(lambda tensor, **more: b.hvd.synchronize(b.hvd.grouped_allreduce_async([tensor], **more))[0])
    for form in forms:
        for average, expected in ((False, size), (True, 1)):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                b.holds(form(b.tensor([1.0]), average=average), [expected])
            assert [warning.category for warning in caught] == [DeprecationWarning]


@case()
def allgather_of_nothing_from_some(b: Any, rank: int, size: int) -> None:
    b.holds(
        b.hvd.allgather(b.tensor(rank_values(rank, rank, 2))),
        np.concatenate([rank_values(r, r, 2) for r in range(size)]),
    )
    b.holds(b.hvd.allgather(b.tensor(rank_values(rank, 0, 2))), np.zeros((0, 2)))


@case()
def allgather_of_much(b: Any, rank: int, size: int) -> None:
    b.holds(b.hvd.allgather(b.tensor(rank_values(rank, 50_000))), everyones(size, 50_000).reshape(-1))


@case()
def grouped_allgather(b: Any, rank: int, size: int) -> None:
    results = b.hvd.grouped_allgather([b.tensor(rank_values(rank, 2)), b.tensor(rank_values(rank, rank, 3))])
    b.holds(results[0], everyones(size, 2).reshape(-1))
    b.holds(results[1], np.concatenate([rank_values(r, r, 3) for r in range(size)]))


@case()
def broadcast_in_every_type_from_every_root(b: Any, rank: int, size: int) -> None:
    for dtype in b.dtypes:
        for root in range(size):
            tensor = b.tensor(rank_values(rank, 3) % 2, dtype)
            b.holds(b.hvd.broadcast(tensor, root), rank_values(root, 3) % 2, dtype)
            b.holds(tensor, rank_values(rank, 3) % 2, dtype)


@case(IN_PLACE)
def broadcast_in_place(b: Any, rank: int, size: int) -> None:
    for shape in ((), (0,), (5,), (100_000,)):
        tensor = b.tensor(rank_values(rank, *shape))
        assert b.same(b.hvd.broadcast_(tensor, size - 1), tensor)
        b.holds(tensor, rank_values(size - 1, *shape))


@case()
def alltoall_without_splits(b: Any, rank: int, size: int) -> None:
    for dtype in b.dtypes:
        result = b.hvd.alltoall(b.tensor(np.full((2 * size, 1), rank % 2), dtype))
        b.holds(result, np.repeat(np.arange(size) % 2, 2).reshape(-1, 1), dtype)


@case()
def alltoall_with_splits(b: Any, rank: int, size: int) -> None:
    # Rank r sends r + i rows to rank i, and one row more that goes nowhere.
    splits = [rank + other for other in range(size)]
    local = np.concatenate([np.full(rows, 10 * rank + to) for to, rows in enumerate(splits)] + [[99]])
    output, received = b.hvd.alltoall(b.tensor(local), splits=b.tensor(splits, DType.INT32))
    b.holds(output, np.concatenate([np.full(other + rank, 10 * other + rank) for other in range(size)]))
    b.holds(received, [other + rank for other in range(size)])


@case(ASYNC)
def asynchronous_alltoall_gives_a_pair(b: Any, rank: int, size: int) -> None:
    output, received = b.hvd.synchronize(b.hvd.alltoall_async(b.tensor(rank_values(rank, size)), name="a"))
    b.holds(output, [rank_values(other, size)[rank] for other in range(size)])
    b.holds(received, [1] * size)


def share(rank: int, rows: int, size: int) -> slice:
    count, extra = divmod(rows, size)
    start = rank * count + min(rank, extra)
    return slice(start, start + count + (rank < extra))


@case()
def reducescatter_with_any_number_of_rows(b: Any, rank: int, size: int) -> None:
    for rows in (0, 1, size, 2 * size + 1):
        local = b.tensor(rank_values(rank, rows, 2))
        total = everyones(size, rows, 2).sum(0)[share(rank, rows, size)]
        b.holds(b.hvd.reducescatter(local, op=b.hvd.Sum), total)
        b.holds(b.hvd.reducescatter(local, op=b.hvd.Sum, prescale_factor=2.0, postscale_factor=0.5), total)
        even = b.tensor(rank_values(0, rows, 2) * 2 * rank)
        b.holds(b.hvd.reducescatter(even), (rank_values(0, rows, 2) * (size - 1))[share(rank, rows, size)])


@case()
def reducescatter_in_every_type(b: Any, rank: int, size: int) -> None:
    for dtype in (dtype for dtype in NUMBERS if dtype in b.dtypes):
        result = b.hvd.reducescatter(b.tensor(rank_values(rank, 4), dtype), op=b.hvd.Sum)
        b.holds(result, everyones(size, 4).sum(0)[share(rank, 4, size)], dtype)


@case()
def grouped_reducescatter(b: Any, rank: int, size: int) -> None:
    results = b.hvd.grouped_reducescatter(
        [b.tensor(rank_values(rank, 4)), b.tensor(rank_values(rank, 5, 2))], op=b.hvd.Sum
    )
    for result, shape in zip(results, ((4,), (5, 2)), strict=True):
        b.holds(result, everyones(size, *shape).sum(0)[share(rank, shape[0], size)])


@case(ASYNC)
def asynchronous_gathers_and_scatters(b: Any, rank: int, size: int) -> None:
    tensor = b.tensor(rank_values(rank, size))
    gathered, scattered = everyones(size, size).reshape(-1), everyones(size, size).sum(0)[rank : rank + 1]
    b.holds(b.hvd.synchronize(b.hvd.allgather_async(tensor, name="x")), gathered)
    b.holds(b.hvd.synchronize(b.hvd.reducescatter_async(tensor, name="x", op=b.hvd.Sum)), scattered)
    b.holds(b.hvd.synchronize(b.hvd.broadcast_async(tensor, 0, name="x")), rank_values(0, size))
    b.holds(b.hvd.synchronize(b.hvd.grouped_allgather_async([tensor], name="x"))[0], gathered)
    b.holds(b.hvd.synchronize(b.hvd.grouped_reducescatter_async([tensor], name="x", op=b.hvd.Sum))[0], scattered)


@case(BARRIER)
def barrier(b: Any, rank: int, size: int) -> None:
    for _ in range(3):
        assert b.hvd.barrier() is None


@case(JOIN)
def ranks_with_less_data_join(b: Any, rank: int, size: int) -> None:
    for step in range(rank + 1):
        result = b.hvd.allreduce(b.tensor([2.0 * size]), name=f"step{step}")
        b.holds(result, [2.0 * (size - step)])  # the divisor stays the number of all ranks
    assert b.hvd.join() == size - 1
    b.holds(b.hvd.allreduce(b.tensor([1.0]), op=b.hvd.Sum), [size])


@case(GRADIENTS)
def gradients(b: Any, rank: int, size: int) -> None:
    weight = rank + 1.0
    total = size * (size + 1) / 2  # of all weights
    mean = total / size

    def check(function: Any, shape: tuple[int, ...], expected: Any) -> None:
        found = b.gradient(function, rank_values(rank, *shape), weight)
        assert np.allclose(found, expected, rtol=1e-6), f"{found} instead of {expected}"

    check(lambda t: b.hvd.allreduce(t, op=b.hvd.Sum), (3,), np.full(3, total))
    check(lambda t: b.hvd.allreduce(t), (2, 2), np.full((2, 2), mean))
    scaled = {"prescale_factor": 2.0, "postscale_factor": 3.0}
    check(lambda t: b.hvd.allreduce(t, op=b.hvd.Sum, **scaled), (2,), np.full(2, 6 * total))
    check(lambda t: b.hvd.allreduce(t, compression=b.hvd.Compression.fp16), (2,), np.full(2, mean))
    check(lambda t: b.hvd.grouped_allreduce([t, t], op=b.hvd.Sum)[1], (2,), np.full(2, total))
    check(b.hvd.allgather, (rank + 1, 2), np.full((rank + 1, 2), mean))
    check(lambda t: b.hvd.grouped_allgather([t, t])[0], (rank + 1,), np.full(rank + 1, mean))
    check(lambda t: b.hvd.broadcast(t, 1), (3,), np.full(3, mean if rank == 1 else 0.0))
    check(b.hvd.alltoall, (size,), np.arange(1.0, size + 1))
    splits = b.tensor([1] * size, DType.INT32)
    check(lambda t: b.hvd.alltoall(t, splits=splits)[0], (size + 1,), [*np.arange(1.0, size + 1), 0.0])
    owners = np.concatenate(
        [np.full(share(r, size + 1, size).stop - share(r, size + 1, size).start, r + 1.0) for r in range(size)]
    )
    check(lambda t: b.hvd.reducescatter(t, op=b.hvd.Sum), (size + 1,), owners * size)
    check(lambda t: b.hvd.reducescatter(t, **scaled), (size + 1,), owners * 6)
    check(lambda t: b.hvd.grouped_reducescatter([t], op=b.hvd.Sum)[0], (size + 1,), owners * size)
