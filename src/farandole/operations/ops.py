# The operations on arrays, as users call them: one table of their variants.
# Touches forms, groups, pending, reductions and requests.
"""Each operation has a form that waits and an `_async` form that gives a handle for `poll` and `synchronize`.

Names ending in `_` work in place. All ranks of the process set call the same operations; named ones in any order,
unnamed ones in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..engine.interface import DType, Kind
from ..world.groups import ProcessSet, global_process_set
from . import repeats
from .forms import (
    FIRST_CALL,
    FIRST_CALL_IN_PLACE,
    GROUP,
    GROUP_IN_PLACE,
    HANDLE,
    HANDLE_IN_PLACE,
    NOTHING,
    WAIT,
    WAIT_IN_PLACE,
    Form,
    Result,
    variant,
)
from .pending import chosen_op, poll, synchronize
from .reductions import Adasum, Average, Max, Min, Product, Sum
from .requests import (
    begin_allgather,
    begin_allreduce,
    begin_alltoall,
    begin_barrier,
    begin_broadcast,
    begin_join,
    begin_reducescatter,
    begin_transfer,
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

# --- allreduce -------------------------------------------------------------------------------------------------------


# The two that wait are no variants: such a call must cost as little as possible.
def allreduce(
    tensor: Any, average: bool | None = None, name: str | None = None, op: Any = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
    *, dtype: DType | None = None,
) -> Any:  # fmt: skip
    """The reduction of all ranks' arrays, as a new array on every rank; the average unless `op` says otherwise."""
    set_id = getattr(process_set, "process_set_id", None)
    key = (False, name, op, average, prescale_factor, postscale_factor, set_id, dtype)
    result = repeats.again(key, tensor)
    if result is None:
        begun = _allreduce(
            FIRST_CALL, tensor, average, name, op, prescale_factor, postscale_factor, process_set, dtype=dtype
        )
        result = repeats.first(key, tensor, begun)
    return result


def allreduce_(
    tensor: Any, average: bool | None = None, name: str | None = None, op: Any = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
    *, dtype: DType | None = None,
) -> Any:  # fmt: skip
    """Allreduce in place; gives `tensor` back."""
    set_id = getattr(process_set, "process_set_id", None)
    key = (True, name, op, average, prescale_factor, postscale_factor, set_id, dtype)
    if repeats.again(key, tensor) is None:
        begun = _allreduce(
            FIRST_CALL_IN_PLACE, tensor, average, name, op, prescale_factor, postscale_factor, process_set, dtype=dtype
        )
        repeats.first(key, tensor, begun)
    return tensor


def _allreduce(
    form: Form[Result], tensor: Any, average: bool | None = None, name: str | None = None, op: Any = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
    *, dtype: DType | None = None,
) -> Result:  # fmt: skip
    """The reduction of all ranks' arrays, as a new array on every rank; the average unless `op` says otherwise."""
    chosen, scales = chosen_op(op, average), (prescale_factor, postscale_factor)
    return form.end(
        begin_allreduce([tensor], name, chosen, scales, process_set, dtype, grouped=False, in_place=form.in_place)
    )


allreduce_async = variant(
    "allreduce_async", _allreduce, HANDLE, "Begins an allreduce; `synchronize` gives the new array."
)
allreduce_async_ = variant("allreduce_async_", _allreduce, HANDLE_IN_PLACE, "Begins an allreduce in place.")


def _grouped_allreduce(
    form: Form[Result], tensors: Sequence[Any], average: bool | None = None, name: str | None = None, op: Any = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
    *, dtype: DType | None = None,
) -> Result:  # fmt: skip
    """Allreduce of several arrays that become ready together."""
    chosen, scales = chosen_op(op, average), (prescale_factor, postscale_factor)
    return form.end(
        begin_allreduce(tensors, name, chosen, scales, process_set, dtype, grouped=True, in_place=form.in_place)
    )


grouped_allreduce = variant("grouped_allreduce", _grouped_allreduce, GROUP)
grouped_allreduce_async = variant(
    "grouped_allreduce_async",
    _grouped_allreduce,
    HANDLE,
    "Begins a grouped allreduce; `synchronize` gives the tuple of new arrays.",
)
grouped_allreduce_ = variant(
    "grouped_allreduce_", _grouped_allreduce, GROUP_IN_PLACE, "Grouped allreduce in place; gives the arrays back."
)
grouped_allreduce_async_ = variant(
    "grouped_allreduce_async_", _grouped_allreduce, HANDLE_IN_PLACE, "Begins a grouped allreduce in place."
)

# --- reducescatter ---------------------------------------------------------------------------------------------------


def _reducescatter(
    form: Form[Result], tensor: Any, name: str | None = None, op: Any = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    *, dtype: DType | None = None,
) -> Result:  # fmt: skip
    """This rank's rows of the reduction; the first `rows % size` ranks get one row more."""
    scales = (prescale_factor, postscale_factor)
    return form.end(begin_reducescatter([tensor], name, op, scales, process_set, dtype, grouped=False))


reducescatter = variant("reducescatter", _reducescatter, WAIT)
reducescatter_async = variant("reducescatter_async", _reducescatter, HANDLE, "Begins a reducescatter.")


def _grouped_reducescatter(
    form: Form[Result], tensors: Sequence[Any], name: str | None = None, op: Any = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    *, dtype: DType | None = None,
) -> Result:  # fmt: skip
    """Reducescatter of several arrays that become ready together."""
    scales = (prescale_factor, postscale_factor)
    return form.end(begin_reducescatter(tensors, name, op, scales, process_set, dtype, grouped=True))


grouped_reducescatter = variant("grouped_reducescatter", _grouped_reducescatter, GROUP)
grouped_reducescatter_async = variant(
    "grouped_reducescatter_async", _grouped_reducescatter, HANDLE, "Begins a grouped reducescatter."
)

# --- allgather -------------------------------------------------------------------------------------------------------


def _allgather(
    form: Form[Result], tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set,
    *, dtype: DType | None = None,
) -> Result:  # fmt: skip
    """All ranks' arrays, one after the other along the first dimension, which may differ between ranks."""
    return form.end(begin_allgather([tensor], name, process_set, dtype, grouped=False))


allgather = variant("allgather", _allgather, WAIT)
allgather_async = variant("allgather_async", _allgather, HANDLE, "Begins an allgather.")


def _grouped_allgather(
    form: Form[Result], tensors: Sequence[Any], name: str | None = None,
    process_set: ProcessSet = global_process_set, *, dtype: DType | None = None,
) -> Result:  # fmt: skip
    """Allgather of several arrays that become ready together."""
    return form.end(begin_allgather(tensors, name, process_set, dtype, grouped=True))


grouped_allgather = variant("grouped_allgather", _grouped_allgather, GROUP)
grouped_allgather_async = variant("grouped_allgather_async", _grouped_allgather, HANDLE, "Begins a grouped allgather.")

# --- broadcast -------------------------------------------------------------------------------------------------------


def _broadcast(
    form: Form[Result], tensor: Any, root_rank: int, name: str | None = None,
    process_set: ProcessSet = global_process_set, *, dtype: DType | None = None,
) -> Result:  # fmt: skip
    """The root's array, as a new array on every rank. `root_rank` is a rank of the job."""
    return form.end(begin_broadcast(tensor, root_rank, name, process_set, dtype, form.in_place))


broadcast = variant("broadcast", _broadcast, WAIT)
broadcast_async = variant("broadcast_async", _broadcast, HANDLE, "Begins a broadcast.")
broadcast_ = variant("broadcast_", _broadcast, WAIT_IN_PLACE, "Broadcast in place; gives `tensor` back.")
broadcast_async_ = variant("broadcast_async_", _broadcast, HANDLE_IN_PLACE, "Begins a broadcast in place.")

# --- alltoall --------------------------------------------------------------------------------------------------------


def _alltoall(
    form: Form[Result], tensor: Any, splits: Any = None, name: str | None = None,
    process_set: ProcessSet = global_process_set, *, dtype: DType | None = None,
) -> Result:  # fmt: skip
    """Sends `splits[i]` rows to member i and gives the rows received; given `splits`, with the received splits."""
    with_splits = splits is not None or form is HANDLE
    return form.end(begin_alltoall(tensor, splits, name, process_set, dtype, with_splits))


alltoall = variant("alltoall", _alltoall, WAIT)
alltoall_async = variant(
    "alltoall_async", _alltoall, HANDLE, "Begins an alltoall; `synchronize` gives the pair (rows, received splits)."
)

# --- barrier, join ---------------------------------------------------------------------------------------------------


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank of the process set has called it."""
    begin_barrier(process_set).result()


def join(device: int = -1) -> int:
    """Declares that this rank has no more data. Until all have joined, it adds zeros to the others' allreduces.

    Gives the rank that joined last. `device` is accepted for compatibility.
    """
    del device
    last: int = begin_join().result()
    return last


# --- send, receive ---------------------------------------------------------------------------------------------------


def _send(
    form: Form[Result], tensor: Any, peer: int, tag: int = 0, process_set: ProcessSet = global_process_set,
    *, dtype: DType | None = None,
) -> Result:  # fmt: skip
    """Sends an array to rank `peer`, which receives it with the same tag."""
    return form.end(begin_transfer(Kind.SEND, tensor, peer, tag, process_set, dtype))


send = variant("send", _send, NOTHING)
isend = variant("isend", _send, HANDLE, "Begins a send.")


def _recv(
    form: Form[Result], tensor: Any, peer: int, tag: int = 0, process_set: ProcessSet = global_process_set,
    *, dtype: DType | None = None,
) -> Result:  # fmt: skip
    """Receives into `tensor`, which has the shape and type of what rank `peer` sends, and gives it back."""
    return form.end(begin_transfer(Kind.RECEIVE, tensor, peer, tag, process_set, dtype))


recv = variant("recv", _recv, WAIT)
irecv = variant("irecv", _recv, HANDLE, "Begins a receive.")
