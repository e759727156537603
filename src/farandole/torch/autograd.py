# Operations that wait and give new tensors; autograd can differentiate them.
# Touches torch, compression and ops.
"""Each backward pass is a collective too, so all ranks of the process set must run it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..engine.interface import ReduceOp
from ..operations.pending import checked_compression, chosen_op
from ..operations.reductions import Average, Sum
from ..world.groups import ProcessSet, global_process_set
from ..world.runtime import runtime
from . import repeats
from .compression import Compression
from .ops import begin_allgather, begin_allreduce, begin_alltoall, begin_broadcast, begin_reducescatter

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "reducescatter",
]

Scales = tuple[float, float]


def _tracked(tensors: Sequence[torch.Tensor]) -> bool:
    for tensor in tensors:  # faster than any(); this runs before every call
        if getattr(tensor, "requires_grad", False):
            return bool(torch.is_grad_enabled())
    return False


# --- allreduce -------------------------------------------------------------------------------------------------------


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: ReduceOp,
        scales: Scales,
        process_set: ProcessSet,
        grouped: bool,
        *tensors: torch.Tensor,
    ) -> Any:
        ctx.arguments = (op, scales, process_set, grouped)
        return begin_allreduce(tensors, name, op, scales, process_set, grouped=grouped, in_place=False).result()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        reduced = _reduce([grad.contiguous() for grad in grads], None, *ctx.arguments)
        return None, None, None, None, None, *reduced


def _reduce(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: ReduceOp,
    scales: Scales,
    process_set: ProcessSet,
    grouped: bool,
) -> Sequence[torch.Tensor]:
    if _tracked(tensors):
        result = _Allreduce.apply(name, op, scales, process_set, grouped, *tensors)
    else:
        result = begin_allreduce(tensors, name, op, scales, process_set, grouped=grouped, in_place=False).result()
    return tuple(result) if grouped else (result,)


def _allreduce(
    tensors: Sequence[torch.Tensor], average: bool | None, name: str | None, compression: Any, op: Any,
    scales: Scales, process_set: ProcessSet, grouped: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    chosen = chosen_op(op, average)
    packed = [checked_compression(compression).compress(tensor) for tensor in tensors]
    reduced = _reduce([tensor for tensor, _ in packed], name, chosen, scales, process_set, grouped)
    return tuple(compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, packed, strict=True))


def allreduce(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, compression: Any = Compression.none,
    op: Any = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:  # fmt: skip
    """The reduction of all ranks' tensors, as a new tensor on every rank; without `op`, the average."""
    scales = (prescale_factor, postscale_factor)
    return _allreduce([tensor], average, name, compression, op, scales, process_set, grouped=False)[0]


def grouped_allreduce(
    tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None,
    compression: Any = Compression.none, op: Any = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Allreduce of several tensors that become ready together."""
    scales = (prescale_factor, postscale_factor)
    return _allreduce(tensors, average, name, compression, op, scales, process_set, grouped=True)


# --- allgather -------------------------------------------------------------------------------------------------------


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, grouped: bool, *tensors: torch.Tensor) -> Any:
        ctx.arguments = (process_set, grouped)
        ctx.rows = [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors]
        return begin_allgather(tensors, name, process_set, grouped).result()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        process_set, grouped = ctx.arguments
        reduced = _reduce([grad.contiguous() for grad in grads], None, Average, (1.0, 1.0), process_set, grouped)
        everyones = allgather(torch.tensor([ctx.rows]), process_set=process_set)
        before = everyones[: process_set.rank()].sum(0).tolist()
        own = [grad.narrow(0, start, rows) for grad, start, rows in zip(reduced, before, ctx.rows, strict=True)]
        return None, None, None, *own


def _gather(tensors: Sequence[torch.Tensor], name: str | None, process_set: ProcessSet, grouped: bool) -> Any:
    if _tracked(tensors):
        return _Allgather.apply(name, process_set, grouped, *tensors)
    return begin_allgather(tensors, name, process_set, grouped).result()


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The tensors of all ranks, concatenated along the first dimension, which may differ between ranks."""
    result: torch.Tensor | None
    if _tracked([tensor]):
        result = _gather([tensor], name, process_set, grouped=False)
        return result
    key = ("allgather", name, getattr(process_set, "process_set_id", None))
    result = repeats.again(key, tensor)
    return (
        repeats.first(key, tensor, begin_allgather([tensor], name, process_set, grouped=False))
        if result is None
        else result
    )


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """Allgather of several tensors that become ready together."""
    return tuple(_gather(tensors, name, process_set, grouped=True))


# --- broadcast -------------------------------------------------------------------------------------------------------


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, root_rank: int, process_set: ProcessSet, tensor: torch.Tensor) -> Any:
        ctx.arguments = (root_rank, process_set)
        return begin_broadcast(tensor, root_rank, name, process_set, in_place=False).result()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        root_rank, process_set = ctx.arguments
        reduced = allreduce(grad.contiguous(), op=Average, process_set=process_set)
        if runtime.world.engine.rank != root_rank:
            reduced = torch.zeros_like(reduced)
        return None, None, None, reduced


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The root's tensor, as a new tensor on every rank. `root_rank` is a rank of the job."""
    if _tracked([tensor]):
        result: torch.Tensor = _Broadcast.apply(name, root_rank, process_set, tensor)
    else:
        result = begin_broadcast(tensor, root_rank, name, process_set, in_place=False).result()
    return result


# --- alltoall --------------------------------------------------------------------------------------------------------


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, splits: Any, name: str | None, process_set: ProcessSet, tensor: torch.Tensor) -> Any:
        output, received = begin_alltoall(tensor, splits, name, process_set).result()
        ctx.arguments = (received, process_set, tensor.shape[0])
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        received, process_set, rows = ctx.arguments
        own, _ = alltoall(grad.contiguous(), received, process_set=process_set)
        # Rows beyond the sum of the splits were not sent.
        kept = torch.cat([own, own.new_zeros(rows - own.shape[0], *own.shape[1:])]) if rows > own.shape[0] else own
        return None, None, None, kept


def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends `splits[i]` rows to member i and gives the received rows; with `splits`, also the received splits."""
    if not _tracked([tensor]):
        if splits is not None:
            return begin_alltoall(tensor, splits, name, process_set).result()
        key = ("alltoall", name, getattr(process_set, "process_set_id", None))
        result = repeats.again(key, tensor)
        if result is None:
            begun = begin_alltoall(tensor, None, name, process_set, pair=False)
            result = repeats.first(key, tensor, begun, repeats.SHARED)
        return result
    output, received = _Alltoall.apply(splits, name, process_set, tensor)
    return output if splits is None else (output, received)


# --- reducescatter ---------------------------------------------------------------------------------------------------


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, op: Any, scales: Scales, process_set: ProcessSet, grouped: bool, *tensors: Any
    ) -> Any:
        ctx.arguments = (op, scales, process_set, grouped)
        return begin_reducescatter(tensors, name, op, scales, process_set, grouped).result()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        op, scales, process_set, grouped = ctx.arguments
        factor = scales[0] * scales[1] * (process_set.size() if op == Sum else 1)
        result = _gather([(grad * factor).contiguous() for grad in grads], None, process_set, grouped)
        return None, None, None, None, None, *(result if grouped else (result,))


def _reducescatter(
    tensors: Sequence[torch.Tensor], name: str | None, compression: Any, op: Any, scales: Scales,
    process_set: ProcessSet, grouped: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    packed = [checked_compression(compression).compress(tensor) for tensor in tensors]
    sent = [tensor for tensor, _ in packed]
    if _tracked(sent):
        result = _Reducescatter.apply(name, op, scales, process_set, grouped, *sent)
    else:
        result = begin_reducescatter(sent, name, op, scales, process_set, grouped).result()
    reduced = result if grouped else (result,)
    return tuple(compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, packed, strict=True))


def reducescatter(
    tensor: torch.Tensor, name: str | None = None, compression: Any = Compression.none, op: Any = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> torch.Tensor:  # fmt: skip
    """This rank's rows of the reduction; the first `rows % size` ranks get one more row."""
    scales = (prescale_factor, postscale_factor)
    return _reducescatter([tensor], name, compression, op, scales, process_set, grouped=False)[0]


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor], name: str | None = None, compression: Any = Compression.none, op: Any = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Reducescatter of several tensors that become ready together."""
    scales = (prescale_factor, postscale_factor)
    return _reducescatter(tensors, name, compression, op, scales, process_set, grouped=True)
