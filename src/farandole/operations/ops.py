# The operations on arrays. This file has those that move data; reductions.py has those that reduce.
# Touches arrays, engine, groups, pending, reductions and runtime.
"""Each operation has a form that waits and an `_async` form that gives a handle for `poll` and `synchronize`.

Names ending in `_` work in place. All ranks of the process set call the same operations; named ones in any order,
unnamed ones in the same order.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..engine.interface import STORAGE, DType, Kind, Memory, Outcome, Request
from ..world.groups import ProcessSet, global_process_set
from ..world.runtime import runtime
from .arrays import Buffer, incoming
from .pending import Submission, finisher, names_of, output_of, poll, refuse_scalar, synchronize
from .reductions import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "irecv",
    "isend",
    "join",
    "poll",
    "recv",
    "reducescatter",
    "reducescatter_async",
    "send",
    "synchronize",
]

_SMALL_RESULT = 64 << 10  # bytes; the engine keeps the memory of large results, which is faster than new memory

# --- allgather -------------------------------------------------------------------------------------------------------


def begin_allgather(
    tensors: Sequence[Any], name: str | None, process_set: ProcessSet, dtype: DType | None, grouped: bool
) -> Submission:
    world = runtime.world
    group, ranks = world.groups.members(process_set)
    buffers = [incoming(tensor, dtype) for tensor in tensors]
    for buffer in buffers:
        refuse_scalar(buffer, "allgather")
    requests = [
        Request(Kind.ALLGATHER, full_name, buffer.array, _likely_output(buffer, len(ranks)), buffer.dtype, group=group)
        for full_name, buffer in zip(
            names_of("allgather", name, len(tensors) if grouped else None), buffers, strict=True
        )
    ]
    return Submission(world, requests, finisher(buffers, grouped, None), grouped)


def _likely_output(buffer: Buffer, members: int) -> Memory:
    """Memory for a small result, for the usual case that all members have as many rows; None: the engine allocates it.

    The engine also allocates it if the result has another size.
    """
    shape = buffer.array.shape
    size = math.prod(shape) * members * STORAGE[buffer.dtype].itemsize
    return buffer.empty_like(shape[0] * members) if 0 < size <= _SMALL_RESULT else None


def allgather(
    tensor: Any,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    dtype: DType | None = None,
) -> Any:
    """All ranks' arrays, one after the other along the first dimension, which may differ between ranks."""
    return begin_allgather([tensor], name, process_set, dtype, False).result()


def allgather_async(
    tensor: Any,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    dtype: DType | None = None,
) -> int:
    """Begins an allgather."""
    return begin_allgather([tensor], name, process_set, dtype, False).handle()


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    dtype: DType | None = None,
) -> tuple[Any, ...]:
    """Allgather of several arrays that become ready together."""
    return tuple(begin_allgather(tensors, name, process_set, dtype, True).result())


def grouped_allgather_async(
    tensors: Sequence[Any],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    dtype: DType | None = None,
) -> int:
    """Begins a grouped allgather."""
    return begin_allgather(tensors, name, process_set, dtype, True).handle()


# --- broadcast -------------------------------------------------------------------------------------------------------


def begin_broadcast(
    tensor: Any, root_rank: int, name: str | None, process_set: ProcessSet, dtype: DType | None, in_place: bool
) -> Submission:
    world = runtime.world
    group, ranks = world.groups.members(process_set)
    root = member(root_rank, ranks, "root_rank")
    buffer = incoming(tensor, dtype, in_place)
    output = buffer.array if in_place else buffer.empty_like()
    [full_name] = names_of("broadcast", name)
    request = Request(Kind.BROADCAST, full_name, buffer.array, output, buffer.dtype, group=group, peer=root)
    return Submission(world, [request], finisher([buffer], False, [tensor] if in_place else None))


def member(rank: Any, ranks: list[int], argument: str) -> int:
    try:
        number = operator.index(rank)
    except TypeError:
        raise ValueError(f"{argument}={rank!r}: expected a rank") from None
    if number not in ranks:
        raise ValueError(f"{argument}={number} is not among the ranks {_shortened(ranks)}")
    return number


def _shortened(ranks: list[int]) -> str:
    return str(ranks) if len(ranks) <= 16 else f"{ranks[0]} to {ranks[-1]} ({len(ranks)} of them)"


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    dtype: DType | None = None,
) -> Any:
    """The root's array, as a new array on every rank. `root_rank` is a rank of the job."""
    return begin_broadcast(tensor, root_rank, name, process_set, dtype, False).result()


def broadcast_async(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    dtype: DType | None = None,
) -> int:
    """Begins a broadcast."""
    return begin_broadcast(tensor, root_rank, name, process_set, dtype, False).handle()


def broadcast_(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    dtype: DType | None = None,
) -> Any:
    """Broadcast in place; gives `tensor` back."""
    return begin_broadcast(tensor, root_rank, name, process_set, dtype, True).result()


def broadcast_async_(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    dtype: DType | None = None,
) -> int:
    """Begins a broadcast in place."""
    return begin_broadcast(tensor, root_rank, name, process_set, dtype, True).handle()


# --- alltoall --------------------------------------------------------------------------------------------------------


def begin_alltoall(
    tensor: Any, splits: Any, name: str | None, process_set: ProcessSet, dtype: DType | None, pair: bool
) -> Submission:
    world = runtime.world
    group, ranks = world.groups.members(process_set)
    buffer = incoming(tensor, dtype)
    refuse_scalar(buffer, "alltoall")
    rows = _rows(splits, buffer.array.shape[0], len(ranks))
    [full_name] = names_of("alltoall", name)
    # Rows beyond the sum of the splits are not sent.
    request = Request(Kind.ALLTOALL, full_name, buffer.head(sum(rows)), None, buffer.dtype, group=group, splits=rows)

    def finish(outcomes: list[Outcome]) -> Any:
        output = buffer.give(output_of(outcomes[0]))
        return (output, np.array(outcomes[0].splits, np.int64)) if pair else output

    return Submission(world, [request], finish)


def _rows(splits: Any, available: int, members: int) -> list[int]:
    """How many rows each member gets; ValueError for invalid splits."""
    if splits is None:
        if available % members:
            raise ValueError(
                f"alltoall without splits: {available} rows cannot be divided evenly among {members} ranks"
            )
        return [available // members] * members
    try:
        rows = [operator.index(count) for count in splits]
    except TypeError:
        raise ValueError(f"splits={splits!r}: expected a list of whole numbers") from None
    if len(rows) != members:
        raise ValueError(f"splits has {len(rows)} entries, but the process set has {members} ranks")
    if min(rows) < 0:
        raise ValueError(f"splits={rows}: a number of rows cannot be negative")
    if sum(rows) > available:
        raise ValueError(f"splits={rows} ask for {sum(rows)} rows, but the array has {available}")
    return rows


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    dtype: DType | None = None,
) -> Any:
    """Sends `splits[i]` rows to member i and gives the rows received; given `splits`, with the received splits."""
    return begin_alltoall(tensor, splits, name, process_set, dtype, splits is not None).result()


def alltoall_async(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    dtype: DType | None = None,
) -> int:
    """Begins an alltoall; `synchronize` gives the pair (rows, received splits)."""
    return begin_alltoall(tensor, splits, name, process_set, dtype, True).handle()


# --- barrier, join ---------------------------------------------------------------------------------------------------


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank of the process set has called it."""
    world = runtime.world
    group, _ = world.groups.members(process_set)
    Submission(world, [Request(Kind.BARRIER, group=group)], lambda outcomes: None).result()


def join(device: int = -1) -> int:
    """Says that this rank has no more data: it adds zeros to the others' allreduces until all have joined.

    Gives the rank that joined last. `device` is there for scripts that pass it.
    """
    del device
    world = runtime.world
    return int(Submission(world, [Request(Kind.JOIN)], lambda outcomes: outcomes[0].value).result())


# --- send, receive ---------------------------------------------------------------------------------------------------


def _transfer(kind: Kind, tensor: Any, peer: int, tag: int, process_set: ProcessSet, dtype: DType | None) -> Submission:
    world = runtime.world
    group, ranks = world.groups.members(process_set)
    receiving = kind == Kind.RECEIVE
    if not -(1 << 63) <= operator.index(tag) < 1 << 63:
        raise ValueError(f"tag={tag} is out of range: it has 64 bits")
    buffer = incoming(tensor, dtype, receiving)
    request = Request(kind, dtype=buffer.dtype, group=group, peer=member(peer, ranks, "peer"), tag=operator.index(tag))
    if receiving:
        request.output = buffer.array
    else:
        request.input = buffer.array
    return Submission(world, [request], lambda outcomes: tensor if receiving else None)


def send(
    tensor: Any,
    peer: int,
    tag: int = 0,
    process_set: ProcessSet = global_process_set,
    *,
    dtype: DType | None = None,
) -> None:
    """Sends an array to rank `peer`, which receives it with the same tag."""
    _transfer(Kind.SEND, tensor, peer, tag, process_set, dtype).result()


def isend(
    tensor: Any,
    peer: int,
    tag: int = 0,
    process_set: ProcessSet = global_process_set,
    *,
    dtype: DType | None = None,
) -> int:
    """Begins a send."""
    return _transfer(Kind.SEND, tensor, peer, tag, process_set, dtype).handle()


def recv(
    tensor: Any,
    peer: int,
    tag: int = 0,
    process_set: ProcessSet = global_process_set,
    *,
    dtype: DType | None = None,
) -> Any:
    """Receives into `tensor`, which has the shape and type of what rank `peer` sends, and gives it back."""
    return _transfer(Kind.RECEIVE, tensor, peer, tag, process_set, dtype).result()


def irecv(
    tensor: Any,
    peer: int,
    tag: int = 0,
    process_set: ProcessSet = global_process_set,
    *,
    dtype: DType | None = None,
) -> int:
    """Begins a receive."""
    return _transfer(Kind.RECEIVE, tensor, peer, tag, process_set, dtype).handle()
