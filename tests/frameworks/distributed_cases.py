# Every operation of torch.distributed, written so that it runs on any backend.
# Touches torch.distributed as users see it.
"""Each case returns its results; the test compares those of two backends."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from distributed_job import case, close, raises
from torch.distributed import ReduceOp

WHOLE = [torch.uint8, torch.int8, torch.int32, torch.int64]
HALVES = [torch.float16, torch.bfloat16]
FLOATS = [torch.float32, torch.float64]
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
BEFORE_2_13 = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


def numbers(rank: int, dtype: torch.dtype, shape: Any = (2, 3)) -> torch.Tensor:
    """Small, and different on every rank."""
    return ((torch.arange(torch.Size(shape).numel()).reshape(shape) * 7 + rank * 3) % 11 + 1).to(dtype)


def allreduced(rank: int, dtypes: list[torch.dtype], ops: tuple[Any, ...]) -> list[torch.Tensor]:
    found = []
    for dtype, op in itertools.product(dtypes, ops):
        tensor = numbers(rank, dtype)
        dist.all_reduce(tensor, op)
        found.append(tensor)
    return found


@case
def allreduce_of_whole_numbers(rank: int, size: int) -> Any:
    return allreduced(rank, [*WHOLE, *FLOATS], (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT))


@case
def allreduce_of_bits(rank: int, size: int) -> Any:
    return allreduced(rank, WHOLE, (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR))


@close
def allreduce_of_floats(rank: int, size: int) -> Any:
    found = []
    for dtype in [*HALVES, *FLOATS]:
        for shape in ((), (1,), (0,), (5, 7), (100_003,)):
            tensor = torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)
            dist.all_reduce(tensor)
            found.append(tensor)
    return found


@case
def reduce_to_each(rank: int, size: int) -> Any:
    found: list[Any] = []
    for root in range(size):
        for op in (ReduceOp.SUM, ReduceOp.MAX):
            tensor = numbers(rank, torch.float32)
            dist.reduce(tensor, root, op)
            found.append(tensor if rank == root else None)
    return found


@case
def broadcast_from_each(rank: int, size: int) -> Any:
    found = []
    for root in range(size):
        for dtype in [*WHOLE, *HALVES, *FLOATS]:
            for shape in ((), (0,), (3, 2), (70_001,)):
                tensor = numbers(rank, dtype, shape)
                dist.broadcast(tensor, root)
                found.append(tensor)
    return found


@case
def gathers(rank: int, size: int) -> Any:
    found: list[Any] = []
    for dtype in [*WHOLE, *HALVES, *FLOATS]:
        for shape in ((), (0,), (2, 3), (40_001,)):
            local = numbers(rank, dtype, shape)
            outputs = [torch.empty_like(local) for _ in range(size)]
            dist.all_gather(outputs, local)
            found.append(outputs)
            if shape:
                whole = torch.empty((size * shape[0], *shape[1:]), dtype=dtype)
                all_gather_single(whole, local)
                found.append(whole)
            for root in range(size):
                gathered = [torch.empty_like(local) for _ in range(size)] if rank == root else None
                dist.gather(local, gathered, root)
                found.append(gathered)
    return found


@case
def scatters(rank: int, size: int) -> Any:
    found: list[Any] = []
    for dtype in [*WHOLE, *HALVES, *FLOATS]:
        for root in range(size):
            output = torch.empty((2, 3), dtype=dtype)
            inputs = [numbers(index, dtype) for index in range(size)] if rank == root else None
            dist.scatter(output, inputs, root)
            found.append(output)
    return found


@case
def reduce_scatters(rank: int, size: int) -> Any:
    found: list[Any] = []
    for dtype in (torch.int64, torch.float32):
        for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT):
            output = torch.empty((2, 3), dtype=dtype)
            dist.reduce_scatter(output, [numbers(rank + index, dtype) for index in range(size)], op)
            found.append(output)
            output = torch.empty((2, 3), dtype=dtype)
            reduce_scatter_single(output, numbers(rank, dtype, (2 * size, 3)), op)
            found.append(output)
    return found


@case
def all_to_alls(rank: int, size: int) -> Any:
    found: list[Any] = []
    for dtype in (torch.int32, torch.float32, torch.float64):
        output = torch.empty((2 * size, 3), dtype=dtype)
        dist.all_to_all_single(output, numbers(rank, dtype, (2 * size, 3)))
        found.append(output)
        sent = [(rank + index) % 3 for index in range(size)]
        came = [(index + rank) % 3 for index in range(size)]
        output = torch.empty((sum(came), 2), dtype=dtype)
        dist.all_to_all_single(output, numbers(rank, dtype, (sum(sent), 2)), came, sent)
        found.append(output)
        outputs = [torch.empty((2,), dtype=dtype) for _ in range(size)]
        inputs = [numbers(rank * size + index, dtype, (2,)) for index in range(size)]
        if BEFORE_2_13 and dist.get_backend() == "gloo":  # it takes no lists
            together = torch.empty((size, 2), dtype=dtype)
            dist.all_to_all_single(together, torch.stack(inputs))
            outputs = list(together)
        else:
            dist.all_to_all(outputs, inputs)
        found.append(outputs)
    return found


@case
def transfers(rank: int, size: int) -> Any:
    found: list[Any] = []
    right, left = (rank + 1) % size, (rank - 1) % size
    for dtype in [*WHOLE, *HALVES, *FLOATS]:
        for shape in ((), (3, 2), (50_001,)):
            output = torch.empty(shape, dtype=dtype)
            requests = [dist.isend(numbers(rank, dtype, shape), right), dist.irecv(output, left)]
            for request in requests:
                request.wait()
            found.append(output)
    # Tags pair them, whatever the order.
    outputs = [torch.empty(2) for _ in range(3)]
    sends = [dist.isend(torch.full((2,), float(10 * rank + tag)), right, tag=tag) for tag in (0, 1, 2)]
    receives = [dist.irecv(outputs[tag], left, tag=tag) for tag in (2, 0, 1)]
    for request in [*receives, *sends]:
        request.wait()
    found.append(outputs)
    # In blocking calls, one after the other.
    tensor = torch.full((4,), float(rank))
    if rank == 0:
        dist.send(tensor, right)
        dist.recv(tensor, left)
    else:
        before = torch.empty(4)
        dist.recv(before, left)
        dist.send(tensor + before, right)
    found.append(tensor)
    output = torch.empty(3)
    operations = [dist.P2POp(dist.isend, torch.full((3,), rank + 0.5), right), dist.P2POp(dist.irecv, output, left)]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    found.append(output)
    return found


@case
def receives_from_anybody(rank: int, size: int) -> Any:
    if rank != 0:
        dist.send(torch.full((2,), float(rank)), 0, tag=5)
        dist.send(torch.full((40_000,), float(rank)), 0, tag=6)
        return None
    found = []
    for tag, count in ((5, 2), (6, 40_000)):
        came = {}
        for _ in range(size - 1):
            tensor = torch.empty(count)
            source = dist.recv(tensor, tag=tag)
            assert torch.equal(tensor, torch.full((count,), float(source)))
            came[source] = float(tensor[0])
        found.append(sorted(came.items()))
    return found


@case
def objects(rank: int, size: int) -> Any:
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, {"rank": rank, "text": "x" * rank * 100})
    received: list[Any] = [("from", rank), rank * 1000] if rank == size - 1 else [None, None]
    dist.broadcast_object_list(received, size - 1)
    gathered: Any = [None] * size if rank == 0 else None
    dist.gather_object([rank] * rank, gathered, 0)
    given: list[Any] = [None]
    dist.scatter_object_list(given, [f"for {index}" for index in range(size)] if rank == 0 else None, 0)
    passed: list[Any] = [None]
    if rank == 0:
        dist.send_object_list([{"a": 1}], 1)
    elif rank == 1:
        dist.recv_object_list(passed, 0)
    return [everyone, received, gathered, given, passed]


@case
def work_objects(rank: int, size: int) -> Any:
    tensor = torch.full((5,), float(rank))
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    assert work.wait() is True
    future = dist.all_reduce(other := torch.full((3,), 2.0), async_op=True).get_future()
    value = future.wait()
    chained = dist.broadcast(third := torch.full((2,), float(rank)), 0, async_op=True).get_future()
    text = chained.then(lambda done: float(done.value()[0].sum())).wait()
    output = torch.empty(size * 2)
    dist.all_gather([*output.chunk(size)], torch.full((2,), float(rank)), async_op=True).get_future().wait()
    return [tensor, other, value[0], third, text, output]


@case
def completed_work(rank: int, size: int) -> Any:
    work = dist.all_reduce(torch.full((5,), float(rank)), async_op=True)
    work.wait()
    return work.is_completed()


@case
def many_at_once(rank: int, size: int) -> Any:
    tensors = [torch.full((10 + index,), float(rank + index)) for index in range(40)]
    for work in reversed([dist.all_reduce(tensor, async_op=True) for tensor in tensors]):
        work.wait()
    return tensors


@case
def groups(rank: int, size: int) -> Any:
    found: list[Any] = []
    pair: Any = dist.new_group([0, size - 1])
    everyone: Any = dist.new_group()
    again: Any = dist.new_group(list(range(size)))
    alone: Any = [dist.new_group([index]) for index in range(size)][rank]
    tensor = torch.full((3,), float(rank + 1))
    if rank in (0, size - 1):
        dist.all_reduce(tensor, group=pair)
        dist.broadcast(other := torch.full((2,), float(rank)), size - 1, group=pair)
        found += [dist.get_rank(pair), dist.get_world_size(pair), other, dist.get_process_group_ranks(pair)]
    dist.all_reduce(tensor, group=alone)
    found.append(tensor)
    # Two groups of the same ranks, used at the same time in another order on each rank.
    ones, twos = torch.ones(1000), torch.full((1000,), 2.0)
    order = [(everyone, ones), (again, twos)]
    for work in [dist.all_reduce(t, group=g, async_op=True) for g, t in (order if rank == 0 else order[::-1])]:
        work.wait()
    found += [ones, twos]
    for group in (everyone, again, alone, *([pair] if rank in (0, size - 1) else [])):
        dist.destroy_process_group(group)
    return found


@case
def coalesced(rank: int, size: int) -> Any:
    tensors = [torch.full((3,), float(rank)), torch.full((2, 2), rank + 1.0)]
    with dist._coalescing_manager(async_ops=False):
        for tensor in tensors:
            dist.all_reduce(tensor)
    return tensors


@case
def functional_collectives(rank: int, size: int) -> Any:
    group: Any = dist.group.WORLD
    local = numbers(rank, torch.float32, (2 * size, 3))
    return [
        functional.all_reduce(local, "sum", group) + 0,
        [tensor + 0 for tensor in functional.all_reduce_coalesced([local, local * 2], "max", group)],
        functional.all_gather_tensor(local, 0, group) + 0,
        functional.all_gather_tensor(local, 1, group) + 0,
        [tensor + 0 for tensor in functional.all_gather_into_tensor_coalesced([local, local[0]], group)],
        functional.reduce_scatter_tensor(local, "sum", 0, group) + 0,
        [t + 0 for t in functional.reduce_scatter_tensor_coalesced([local, local], "sum", [0, 0], group)],
        functional.all_to_all_single(local, None, None, group) + 0,
        functional.broadcast(local, 1, group) + 0,
    ]


@case
def bad_input(rank: int, size: int) -> Any:
    tensor = torch.ones(4)
    old_gloo = BEFORE_2_13 and dist.get_backend() == "gloo"  # it aborts the process
    return [
        raises(dist.all_reduce, "text"),
        raises(dist.broadcast, tensor, size),
        raises(dist.broadcast, tensor, -1),
        raises(dist.all_gather, [torch.empty(4)] * (size + 1), tensor),
        raises(dist.all_gather, [torch.empty(4, dtype=torch.int32)] * size, tensor),
        raises(dist.all_gather, [torch.empty(5)] * size, tensor),
        raises(all_gather_single, torch.empty(4 * size + 1), tensor),
        "raises" if old_gloo else raises(reduce_scatter_single, torch.empty(3), torch.ones(4 * size + 1)),
        raises(dist.reduce_scatter, torch.empty(4), [tensor] * (size + 1)),
        raises(dist.gather, tensor, [torch.empty(4)] * (size + 1) if rank == 0 else [torch.empty(4)], 0),
        raises(dist.scatter, tensor, [torch.empty(4)] * (size + 1) if rank == 0 else [torch.empty(4)], 0),
        raises(dist.all_to_all_single, torch.empty(4), tensor, [1] * size, [4] * size),
        raises(dist.all_reduce, torch.ones(3), ReduceOp.BAND),
        raises(dist.all_reduce, torch.ones(3).to_sparse(), ReduceOp.MAX),
        raises(dist.send, tensor, rank),
        "raises" if BEFORE_2_13 else raises(dist.new_group, [0, 0]),  # Gloo waited for ever; torch did not look
        raises(dist.new_group, [size]),
    ]


@case
def a_group_that_only_members_make(rank: int, size: int) -> Any:
    # After all other groups: torch derives names from how many groups a rank has, or has ever made.
    if rank > 1:
        return None
    near: Any = dist.new_group([0, 1], use_local_synchronization=True)
    outputs = [torch.empty(2) for _ in range(2)]
    dist.all_gather(outputs, torch.full((2,), float(rank)), group=near)
    dist.destroy_process_group(near)
    return outputs
