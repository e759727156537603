# Operations of torch.distributed that Gloo does not have, or not for all types, compared with the expected values.
# Touches torch.distributed as users see it.
"""Each case contains its assertions."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from distributed_cases import all_gather_single, numbers, reduce_scatter_single
from distributed_job import case
from torch.distributed import ReduceOp

from farandole.world.runtime import runtime


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
    wanted = sum(2.0 * (index + 0.5) for index in range(size))
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
    torch.testing.assert_close(tensor, sum(numbers(index, torch.float32, (3, 3)).t() for index in range(size)))
    column = torch.zeros(4, 2)
    dist.broadcast(column[:, 1] if rank else column[:, 1].fill_(3.0), 0)
    assert column.tolist() == [[0.0, 3.0]] * 4
    outputs = [torch.empty(3, 3).t() for _ in range(size)]
    dist.all_gather(outputs, square)
    assert all(torch.equal(output, numbers(index, torch.float32, (3, 3))) for index, output in enumerate(outputs))


@case
def any_shape_of_the_whole(rank: int, size: int) -> Any:
    stacked = torch.empty(size, 2, 3)
    all_gather_single(stacked, numbers(rank, torch.float32))
    assert torch.equal(stacked, torch.stack([numbers(index, torch.float32) for index in range(size)]))


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
    # Nobody waits for it: it comes in its own time, and lands while other operations continue.
    until = time.monotonic() + 20
    here = torch.zeros(1)
    while not here and time.monotonic() < until:
        here.fill_([float(output[0]) for output in outputs] == [index + 1.0 for index in range(size)])
        dist.all_reduce(here, ReduceOp.MIN)
    assert here


@case
def uneven_parts(rank: int, size: int) -> Any:
    output = torch.empty(rank + 1)
    dist.reduce_scatter(output, [torch.full((index + 1,), float(index)) for index in range(size)])
    assert output.tolist() == [float(rank * size)] * (rank + 1)
    outputs = [torch.empty(index) for index in range(size)]
    dist.all_gather(outputs, torch.full((rank,), float(rank)))
    assert all(output.tolist() == [float(index)] * index for index, output in enumerate(outputs))


@case
def monitored(rank: int, size: int) -> Any:
    dist.group.WORLD.monitored_barrier(timedelta(seconds=20), wait_all_ranks=True)


@case
def names_of_the_group(rank: int, size: int) -> Any:
    group = dist.group.WORLD
    serving = dist.get_backend_impl() if hasattr(dist, "get_backend_impl") else group  # torch before 2.15
    assert dist.get_backend() == "farandole" and serving.name() == "farandole"
    assert group.group_name and group.rank() == rank and group.size() == size


@case
def a_timeout_names_who_is_missing(rank: int, size: int) -> Any:
    group: Any = dist.new_group(timeout=timedelta(seconds=60))
    if rank == size - 1:
        time.sleep(2.5)  # sleep: the fault, a rank that comes after the timeout of the others
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


def _mapped() -> int:
    """Pieces of shared memory that this process has."""
    with open("/proc/self/maps") as lines:
        return sum("memfd" in line for line in lines)


@case
def destroyed_groups_are_freed(rank: int, size: int) -> Any:
    before = _mapped()
    for _ in range(5):
        group: Any = dist.new_group()
        dist.all_reduce(torch.ones(3), group=group)
        dist.barrier(group=group)
        dist.destroy_process_group(group)
    until = time.monotonic() + 10
    while _mapped() != before and time.monotonic() < until:  # whoever drives the engine takes it away after the answer
        time.sleep(0.01)  # sleep: between two looks
    assert _mapped() == before, (_mapped(), before)


@case
def one_group_is_aborted_alone(rank: int, size: int) -> Any:
    doomed: Any = dist.new_group()
    other: Any = dist.new_group()
    dist.barrier(group=doomed)
    if rank == 0:
        work = dist.all_reduce(torch.ones(3), group=doomed, async_op=True) if size < 3 else None
        dist.barrier(group=other)
        doomed.abort()
    else:
        work = dist.all_reduce(torch.ones(1 << 20), group=doomed, async_op=True) if rank == 1 and size > 2 else None
        if size == 2:
            work = dist.barrier(group=doomed, async_op=True)
        dist.barrier(group=other)
    for attempt in (work, None):
        try:
            if attempt is None:
                dist.all_reduce(torch.ones(3), group=doomed)
            else:
                attempt.wait()
        except dist.DistBackendError as error:
            assert "rank 0 has aborted" in str(error), str(error)
        else:
            assert attempt is None and work is None, "no error"
    total = torch.ones(3)
    dist.all_reduce(total, group=other)
    dist.all_reduce(total)
    assert total.tolist() == [float(size * size)] * 3
    dist.destroy_process_group(doomed)
    dist.destroy_process_group(other)


@case
def a_group_is_split(rank: int, size: int) -> Any:
    pair = dist.group.WORLD.split_group([size - 1, 0], group_desc="ends")
    assert (pair is None) == (rank not in (0, size - 1))
    if pair is not None:
        tensor = torch.full((3,), float(rank + 1))
        pair.allreduce([tensor], dist.AllreduceOptions()).wait()
        assert tensor.tolist() == [float(size + 1)] * 3 and pair.size() == 2 and pair.group_desc == "ends"
        assert pair.rank() == (rank == 0)
        pair.shutdown()
    for _ in range(2):
        again = dist.group.WORLD.split_group(list(range(size)))
        again.barrier(dist.BarrierOptions()).wait()
        again.shutdown()


def _in_place_bytes() -> int:
    return runtime.world.engine.counter("in_place_bytes")


def _await(condition: Callable[[], bool], what: str) -> None:
    """Goes round with all ranks until it holds on each of them."""
    until = time.monotonic() + 20
    holds = torch.zeros(1)
    while not holds:
        assert time.monotonic() < until, what
        holds.fill_(condition())
        dist.all_reduce(holds, ReduceOp.MIN)


def _shared_files() -> int:
    """Tensors in shared memory that this process has mapped, its neighbours' among them."""
    return Path("/proc/self/maps").read_text().count("/dev/shm/torch_")


def _reduce_shared(own_part: torch.Tensor) -> None:
    plain, shared = own_part.clone(), own_part.clone().share_memory_()
    dist.all_reduce(plain)
    before = _in_place_bytes()

    def reduced() -> bool:
        shared.copy_(own_part)
        dist.all_reduce(shared)
        assert torch.equal(shared, plain), own_part.dtype
        return _in_place_bytes() > before

    _await(reduced, "no sum was made in shared memory")


@case
def shared_tensors_are_reduced_where_they_lie(rank: int, size: int) -> Any:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        _reduce_shared(numbers(rank, dtype, (1500, 1001)))
    _await(lambda: _shared_files() == 0, "the neighbours' memory is still here")


@case
def tensors_of_users_stay_where_they_are(rank: int, size: int) -> Any:
    array = numpy.ones(1 << 20, dtype=numpy.float32)
    tensor = torch.from_numpy(array)
    for turn in range(1, 6):
        dist.all_reduce(tensor)
        assert (array == float(size) ** turn).all() and not tensor.is_shared()


@case
def tensors_that_hooks_reduce_stay_where_they_are(rank: int, size: int) -> Any:
    weight = torch.ones(1 << 20, requires_grad=True)
    array = numpy.zeros(1 << 20, dtype=numpy.float32)
    buffer = torch.from_numpy(array)
    works: list[Any] = []

    def reduce(_: torch.Tensor) -> None:
        assert weight.grad is not None
        buffer.copy_(weight.grad)
        works.append(dist.all_reduce(buffer, async_op=True))

    weight.register_post_accumulate_grad_hook(reduce)
    for _ in range(4):
        weight.grad = None
        (weight * float(rank + 1)).sum().backward()
        works.pop().wait()
        assert (array == size * (size + 1) / 2).all() and not buffer.is_shared()


def _buckets(rank: int, size: int, view: bool) -> None:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*[torch.nn.Linear(900, 900, bias=False) for _ in range(3)])
    model = torch.nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=3, gradient_as_bucket_view=view)
    before = _in_place_bytes()
    for step in range(6):
        given = torch.randn(4, 900, generator=torch.Generator().manual_seed(100 * step + rank))
        alone = torch.autograd.grad(layers(given).square().mean(), list(layers.parameters()))
        model.zero_grad()
        model(given).square().mean().backward()
        for parameter, local in zip(layers.parameters(), alone, strict=True):
            parts = [torch.empty_like(local) for _ in range(size)]
            dist.all_gather(parts, local / size)
            wanted = parts[0].clone()
            for part in parts[1:]:
                wanted += part
            torch.testing.assert_close(parameter.grad, wanted)
    assert _in_place_bytes() > before, "DDP's buckets went another way"


@case
def buckets_of_ddp_are_reduced_where_they_lie(rank: int, size: int) -> Any:
    for view in (False, True):
        _buckets(rank, size, view)
        gc.collect()
        _await(lambda: _shared_files() == 0, "a bucket's memory is still here")
