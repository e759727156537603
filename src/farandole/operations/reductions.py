# The operations that reduce: allreduce and reducescatter in all their forms.
# Touches arrays, engine, errors, groups, pending and runtime.
"""Sum, average, minimum, maximum, product and Adasum over the ranks of a process set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..base import errors
from ..engine.interface import FLOATING, DType, Kind, ReduceOp, Request
from ..world.groups import ProcessSet, global_process_set
from ..world.runtime import runtime
from .arrays import incoming
from .pending import Submission, checked_scales, chosen_op, finisher, names_of, refuse_scalar

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

# --- allreduce -------------------------------------------------------------------------------------------------------


def begin_allreduce(
    tensors: Sequence[Any],
    average: bool | None,
    name: str | None,
    op: Any,
    scales: tuple[float, float],
    process_set: ProcessSet,
    dtype: DType | None,
    grouped: bool,
    in_place: bool,
) -> Submission:
    chosen = chosen_op(op, average)
    prescale, postscale = checked_scales(scales)
    world = runtime.world
    group, _ = world.groups.members(process_set)
    buffers = [incoming(tensor, dtype, in_place) for tensor in tensors]
    for buffer in buffers:
        if chosen == Adasum and buffer.dtype not in FLOATING:
            raise ValueError(f"Adasum needs a floating type, not {buffer.dtype.name.lower()}")
    requests = [
        Request(
            Kind.ALLREDUCE,
            full_name,
            buffer.array,
            buffer.array if in_place else buffer.empty_like(),
            buffer.dtype,
            chosen,
            group,
            prescale=prescale,
            postscale=postscale,
        )
        for full_name, buffer in zip(
            names_of("allreduce", name, len(tensors) if grouped else None), buffers, strict=True
        )
    ]
    return Submission(world, requests, finisher(buffers, grouped, tensors if in_place else None), grouped)


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    dtype: DType | None = None,
) -> Any:
    """The reduction of all ranks' arrays, as a new array on every rank; the average unless `op` says otherwise."""
    scales = (prescale_factor, postscale_factor)
    return begin_allreduce([tensor], average, name, op, scales, process_set, dtype, False, False).result()


def allreduce_async(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    dtype: DType | None = None,
) -> int:
    """Begins an allreduce; `synchronize` gives the new array."""
    scales = (prescale_factor, postscale_factor)
    return begin_allreduce([tensor], average, name, op, scales, process_set, dtype, False, False).handle()


def allreduce_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    dtype: DType | None = None,
) -> Any:
    """Allreduce in place; gives `tensor` back."""
    scales = (prescale_factor, postscale_factor)
    return begin_allreduce([tensor], average, name, op, scales, process_set, dtype, False, True).result()


def allreduce_async_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    dtype: DType | None = None,
) -> int:
    """Begins an allreduce in place."""
    scales = (prescale_factor, postscale_factor)
    return begin_allreduce([tensor], average, name, op, scales, process_set, dtype, False, True).handle()


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    dtype: DType | None = None,
) -> tuple[Any, ...]:
    """Allreduce of several arrays that become ready together."""
    scales = (prescale_factor, postscale_factor)
    begun = begin_allreduce(tensors, average, name, op, scales, process_set, dtype, True, False)
    return tuple(begun.result())


def grouped_allreduce_async(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    dtype: DType | None = None,
) -> int:
    """Begins a grouped allreduce; `synchronize` gives the tuple of new arrays."""
    scales = (prescale_factor, postscale_factor)
    return begin_allreduce(tensors, average, name, op, scales, process_set, dtype, True, False).handle()


def grouped_allreduce_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    dtype: DType | None = None,
) -> tuple[Any, ...]:
    """Grouped allreduce in place; gives the arrays back."""
    scales = (prescale_factor, postscale_factor)
    begun = begin_allreduce(tensors, average, name, op, scales, process_set, dtype, True, True)
    return tuple(begun.result())


def grouped_allreduce_async_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    dtype: DType | None = None,
) -> int:
    """Begins a grouped allreduce in place."""
    scales = (prescale_factor, postscale_factor)
    return begin_allreduce(tensors, average, name, op, scales, process_set, dtype, True, True).handle()


# --- reducescatter ---------------------------------------------------------------------------------------------------


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
    place, count = ranks.index(world.engine.rank), len(ranks)
    requests = []
    for full_name, buffer in zip(
        names_of("reducescatter", name, len(tensors) if grouped else None), buffers, strict=True
    ):
        refuse_scalar(buffer, "reducescatter")
        rows, extra = divmod(buffer.array.shape[0], count)
        output = buffer.empty_like(rows + (place < extra))
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


def reducescatter(
    tensor: Any,
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    dtype: DType | None = None,
) -> Any:
    """This rank's rows of the reduction; the first `rows % size` ranks get one row more."""
    scales = (prescale_factor, postscale_factor)
    return begin_reducescatter([tensor], name, op, scales, process_set, dtype, False).result()


def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    dtype: DType | None = None,
) -> int:
    """Begins a reducescatter."""
    scales = (prescale_factor, postscale_factor)
    return begin_reducescatter([tensor], name, op, scales, process_set, dtype, False).handle()


def grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    dtype: DType | None = None,
) -> tuple[Any, ...]:
    """Reducescatter of several arrays that become ready together."""
    scales = (prescale_factor, postscale_factor)
    return tuple(begin_reducescatter(tensors, name, op, scales, process_set, dtype, True).result())


def grouped_reducescatter_async(
    tensors: Sequence[Any],
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    dtype: DType | None = None,
) -> int:
    """Begins a grouped reducescatter."""
    scales = (prescale_factor, postscale_factor)
    return begin_reducescatter(tensors, name, op, scales, process_set, dtype, True).handle()


# --- gradients of a step ---------------------------------------------------------------------------------------------

Gradients = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]


def apart(
    gradients: Sequence[Any], variables: Sequence[Any], local: set[int], keep: Gradients, reduce: Gradients
) -> Any:
    """`reduce` of the gradients and their variables, `keep` of those of local variables, in the order given."""
    alone = [id(variable) in local for variable in variables]

    def part(function: Gradients, wanted: bool) -> list[Any]:
        places = [place for place, is_local in enumerate(alone) if is_local == wanted]
        if not places:
            return []
        return list(function([gradients[place] for place in places], [variables[place] for place in places]))

    kept, reduced = iter(part(keep, True)), iter(part(reduce, False))
    return [next(kept if is_local else reduced) for is_local in alone]
