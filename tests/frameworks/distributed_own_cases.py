# What torch.distributed offers and Gloo does not, or not on all types: checked against what it must be.
# Touches torch.distributed as users see it.
"""Each case asserts by itself."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from distributed_cases import all_gather_single, numbers, reduce_scatter_single
from distributed_job import case
from torch.distributed import ReduceOp


@case
def averages(rank: int, size: int) -> Any:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        tensor = torch.full((5,), float(rank), dtype=dtype)
        dist.all_reduce(tensor, ReduceOp.AVG)
        torch.testing.assert_close(tensor, torch.full((5,), (size - 1) / 2, dtype=dtype))
        output = torch.empty(2, dtype=dtype)
        reduce_scatter_single(output, torch.full((2 * size,), float(rank), dtype=dtype), ReduceOp.AVG)
        torch.testing.assert_close(output, torch.full((2,), (size - 1) / 2, dtype=dtype))


@case
def factors(rank: int, size: int) -> Any:
    op = dist._make_nccl_premul_sum(rank + 0.5)  # a factor of each rank's own
    tensor = torch.full((3,), 2.0)
    dist.all_reduce(tensor, op)
    wanted = sum(2.0 * (place + 0.5) for place in range(size))
    torch.testing.assert_close(tensor, torch.full((3,), wanted))
    given, output = torch.full((size * 2,), 2.0), torch.empty(2)
    reduce_scatter_single(output, given, op)
    torch.testing.assert_close(output, torch.full((2,), wanted))
    assert torch.equal(given, torch.full((size * 2,), 2.0))


@case
def bits_of_parts(rank: int, size: int) -> Any:
    output = torch.empty(2, dtype=torch.int64)
    reduce_scatter_single(output, torch.full((2 * size,), 1 << rank), ReduceOp.BOR)
    assert output.tolist() == [(1 << size) - 1] * 2
    flags = torch.arange(size) == rank
    dist.all_reduce(flags, ReduceOp.BOR)
    assert flags.all()


@case
def any_layout(rank: int, size: int) -> Any:
    square = numbers(rank, torch.float32, (3, 3))
    tensor = square.clone().t()
    dist.all_reduce(tensor)
    torch.testing.assert_close(tensor, sum(numbers(place, torch.float32, (3, 3)).t() for place in range(size)))
    column = torch.zeros(4, 2)
    dist.broadcast(column[:, 1] if rank else column[:, 1].fill_(3.0), 0)
    assert column.tolist() == [[0.0, 3.0]] * 4
    outputs = [torch.empty(3, 3).t() for _ in range(size)]
    dist.all_gather(outputs, square)
    assert all(torch.equal(output, numbers(place, torch.float32, (3, 3))) for place, output in enumerate(outputs))


@case
def any_shape_of_the_whole(rank: int, size: int) -> Any:
    stacked = torch.empty(size, 2, 3)
    all_gather_single(stacked, numbers(rank, torch.float32))
    assert torch.equal(stacked, torch.stack([numbers(place, torch.float32) for place in range(size)]))


@case
def any_type_is_copied(rank: int, size: int) -> Any:
    for dtype in (torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn):
        tensor = (torch.arange(6) % 3 == rank).to(dtype)
        wanted = (torch.arange(6) % 3 == 0).to(dtype)
        dist.broadcast(tensor, 0)
        assert torch.equal(tensor.view(torch.uint8), wanted.view(torch.uint8)), dtype


@case
def forgotten_work_arrives(rank: int, size: int) -> Any:
    outputs = [torch.zeros(3) for _ in range(size)]
    dist.all_gather(outputs, torch.full((3,), rank + 1.0), async_op=True)
    for _ in range(3):
        dist.barrier()
    assert [float(output[0]) for output in outputs] == [place + 1.0 for place in range(size)]


@case
def uneven_parts(rank: int, size: int) -> Any:
    output = torch.empty(rank + 1)
    dist.reduce_scatter(output, [torch.full((place + 1,), float(place)) for place in range(size)])
    assert output.tolist() == [float(rank * size)] * (rank + 1)
    outputs = [torch.empty(place) for place in range(size)]
    dist.all_gather(outputs, torch.full((rank,), float(rank)))
    assert all(output.tolist() == [float(place)] * place for place, output in enumerate(outputs))


@case
def monitored(rank: int, size: int) -> Any:
    dist.group.WORLD.monitored_barrier(timedelta(seconds=20), wait_all_ranks=True)


@case
def names_of_the_group(rank: int, size: int) -> Any:
    group = dist.group.WORLD
    assert dist.get_backend() == "farandole" and group.name() == "farandole"
    assert group.group_name and group.rank() == rank and group.size() == size


@case
def a_timeout_names_who_is_missing(rank: int, size: int) -> Any:
    group = dist.new_group(timeout=timedelta(seconds=60))
    if rank == size - 1:
        import time

        time.sleep(2.5)
        dist.barrier(group=group)
        return
    work = dist.barrier(group=group, async_op=True)
    try:
        work.wait(timedelta(seconds=0.5))
    except dist.DistBackendError as error:
        assert "barrier" in str(error) and f"did not call it: {size - 1}" in str(error), str(error)
    else:
        raise AssertionError("no timeout")
    work.wait()
