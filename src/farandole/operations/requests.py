# The requests of every operation: checks the caller's arguments and describes to the engine what is to be done.
# Touches the rooms base, engine and world; the files arrays, pending and reductions.
"""`begin_*` gives a `Submission`: the caller waits for it, or gets a handle. ops.py and the bindings call them."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..base import errors
from ..engine.interface import FLOATING, STORAGE, DType, Kind, Memory, Outcome, ReduceOp, Request
from ..world.groups import ProcessSet
from ..world.runtime import runtime
from .arrays import Buffer, incoming
from .pending import Submission, checked_scales, chosen_op, finisher, names_of, output_of, refuse_scalar
from .reductions import Adasum, Average, Sum


def begin_allreduce(
    tensors: Sequence[Any],
    name: str | None,
    op: ReduceOp,
    scales: tuple[float, float],
    process_set: ProcessSet,
    dtype: DType | None,
    grouped: bool,
    in_place: bool,
) -> Submission:
    prescale, postscale = checked_scales(scales)
    world = runtime.world
    group, _ = world.groups.members(process_set)
    buffers = [incoming(tensor, dtype, in_place) for tensor in tensors]
    for buffer in buffers:
        if op == Adasum and buffer.dtype not in FLOATING:
            raise ValueError(f"Adasum needs a floating type, not {buffer.dtype.name.lower()}")
    requests = [
        Request(
            Kind.ALLREDUCE,
            full_name,
            buffer.array,
            buffer.array if in_place else buffer.empty_like(),
            buffer.dtype,
            op,
            group,
            prescale=prescale,
            postscale=postscale,
        )
        for full_name, buffer in zip(
            names_of("allreduce", name, len(tensors) if grouped else None), buffers, strict=True
        )
    ]
    return Submission(world, requests, finisher(buffers, grouped, tensors if in_place else None), grouped)


def begin_reducescatter(
    tensors: Sequence[Any],
    name: str | None,
    op: Any,
    scales: tuple[float, float],
    process_set: ProcessSet,
    dtype: DType | None,
    grouped: bool,
) -> Submission:
    chosen = chosen_op(op, None)
    if chosen not in (Average, Sum):
        raise errors.HorovodInternalError("Reducescatter currently only supports Average and Sum")
    prescale, postscale = checked_scales(scales)
    world = runtime.world
    group, ranks = world.groups.members(process_set)
    buffers = [incoming(tensor, dtype) for tensor in tensors]
    index, count = ranks.index(world.engine.rank), len(ranks)
    requests = []
    for full_name, buffer in zip(
        names_of("reducescatter", name, len(tensors) if grouped else None), buffers, strict=True
    ):
        refuse_scalar(buffer, "reducescatter")
        rows, extra = divmod(buffer.array.shape[0], count)
        output = buffer.empty_like(rows + (index < extra))
        requests.append(
            Request(
                Kind.REDUCESCATTER,
                full_name,
                buffer.array,
                output,
                buffer.dtype,
                chosen,
                group,
                prescale=prescale,
                postscale=postscale,
            )
        )
    return Submission(world, requests, finisher(buffers, grouped, None), grouped)


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
    """Memory for the result, for the usual case that all members have as many rows; None: the engine allocates it.

    The engine also allocates it if the result has another size.
    """
    shape = buffer.array.shape
    size = math.prod(shape) * members * STORAGE[buffer.dtype].itemsize
    return buffer.empty_like(shape[0] * members) if 0 < size <= buffer.offered else None


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
    return Submission(world, [request], finisher([buffer], grouped=False, in_place=[tensor] if in_place else None))


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
    sent = buffer.head(sum(rows))
    # In the usual case as many rows come back. Small results are not worth a guess.
    output = buffer.empty_like(sum(rows)) if buffer.offered > Buffer.offered and sum(rows) > 0 else None
    request = Request(Kind.ALLTOALL, full_name, sent, output, buffer.dtype, group=group, splits=rows)

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


def begin_barrier(process_set: ProcessSet) -> Submission:
    world = runtime.world
    group, _ = world.groups.members(process_set)
    return Submission(world, [Request(Kind.BARRIER, group=group)], lambda outcomes: None)


def begin_join() -> Submission:
    runtime.world.joins += 1
    return Submission(runtime.world, [Request(Kind.JOIN)], lambda outcomes: int(outcomes[0].value))


def begin_transfer(
    kind: Kind, tensor: Any, peer: int, tag: int, process_set: ProcessSet, dtype: DType | None
) -> Submission:
    world = runtime.world
    group, ranks = world.groups.members(process_set)
    receiving = kind == Kind.RECEIVE
    if not -(1 << 63) <= operator.index(tag) < 1 << 63:
        raise ValueError(f"tag={tag} is out of range: expected a number of 64 bits")
    buffer = incoming(tensor, dtype, receiving)
    request = Request(kind, dtype=buffer.dtype, group=group, peer=member(peer, ranks, "peer"), tag=operator.index(tag))
    if receiving:
        request.output = buffer.array
    else:
        request.input = buffer.array
    return Submission(world, [request], lambda outcomes: tensor if receiving else None)
