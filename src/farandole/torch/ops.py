# Operations on tensors that give handles or work in place. Operations that autograd differentiates: autograd.py.
# Touches torch, memory and the NumPy layer, which does the work.
"""Operations with the names, arguments and rules of Horovod, on CPU and CUDA tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Any

import numpy as np
import torch

from ..engine.interface import ReduceOp
from ..operations import requests
from ..operations.forms import FIRST_CALL_IN_PLACE, HANDLE, HANDLE_IN_PLACE, Form, Result, variant
from ..operations.pending import Submission, chosen_op, poll, synchronize
from ..operations.reductions import Average, Sum
from ..world.groups import ProcessSet, global_process_set
from ..world.runtime import runtime
from . import memory, repeats

__all__ = [
    "allgather_async",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall_async",
    "barrier",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather_async",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]

# --- how each begins -------------------------------------------------------------------------------------------------


def begin_allreduce(
    tensors: Sequence[torch.Tensor], name: str | None, op: ReduceOp, scales: tuple[float, float],
    process_set: ProcessSet, grouped: bool, in_place: bool,
) -> Submission:  # fmt: skip
    return memory.begin(
        tensors,
        in_place,
        grouped,
        lambda buffers, within: requests.begin_allreduce(buffers, name, op, scales, process_set, None, grouped, within),
    )


def begin_reducescatter(
    tensors: Sequence[torch.Tensor], name: str | None, op: Any, scales: tuple[float, float],
    process_set: ProcessSet, grouped: bool,
) -> Submission:  # fmt: skip
    return memory.begin(
        tensors,
        False,
        grouped,
        lambda buffers, _: requests.begin_reducescatter(buffers, name, op, scales, process_set, None, grouped),
    )


def begin_allgather(
    tensors: Sequence[torch.Tensor], name: str | None, process_set: ProcessSet, grouped: bool
) -> Submission:
    return memory.begin(
        tensors,
        False,
        grouped,
        lambda buffers, _: requests.begin_allgather(buffers, name, process_set, None, grouped),
    )


def begin_broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet, in_place: bool
) -> Submission:
    return memory.begin(
        [tensor],
        in_place,
        False,
        lambda buffers, within: requests.begin_broadcast(buffers[0], root_rank, name, process_set, None, within),
    )


def begin_alltoall(
    tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet, pair: bool = True
) -> Submission:
    """The result is the rows, or the pair (rows, received splits)."""
    rows = splits.tolist() if hasattr(splits, "tolist") else splits
    begun = memory.begin(
        [tensor],
        False,
        False,
        lambda buffers, _: requests.begin_alltoall(buffers[0], rows, name, process_set, None, False),
    )
    if pair:
        give = begun.finish
        begun.finish = lambda outcomes: (give(outcomes), torch.from_numpy(np.asarray(outcomes[0].splits, np.int32)))
    return begun


# --- allreduce -------------------------------------------------------------------------------------------------------

GROUP_IN_PLACE: Form[tuple[torch.Tensor, ...]] = Form(methodcaller("result"), "tuple[torch.Tensor, ...]", True)


# Not a variant: a call that waits must cost as little as possible.
def allreduce_(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: Any = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> torch.Tensor:  # fmt: skip
    """Allreduce in place; returns `tensor`."""
    key = (name, op, average, prescale_factor, postscale_factor, getattr(process_set, "process_set_id", None))
    if repeats.again(key, tensor) is None:
        begun = _allreduce(
            FIRST_CALL_IN_PLACE, tensor, average, name, op, prescale_factor, postscale_factor, process_set
        )
        repeats.first(key, tensor, begun)
    return tensor


def _allreduce(
    form: Form[Result], tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: Any = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Result:  # fmt: skip
    """Begins an allreduce; `synchronize` gives the new tensor."""
    chosen, scales = chosen_op(op, average), (prescale_factor, postscale_factor)
    return form.end(begin_allreduce([tensor], name, chosen, scales, process_set, False, form.in_place))


allreduce_async = variant("allreduce_async", _allreduce, HANDLE)
allreduce_async_ = variant("allreduce_async_", _allreduce, HANDLE_IN_PLACE, "Begins an allreduce in place.")


def _grouped_allreduce(
    form: Form[Result], tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None,
    op: Any = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Result:  # fmt: skip
    """Begins allreduces that become ready together; `synchronize` gives the tuple of new tensors."""
    chosen, scales = chosen_op(op, average), (prescale_factor, postscale_factor)
    return form.end(begin_allreduce(tensors, name, chosen, scales, process_set, True, form.in_place))


grouped_allreduce_async = variant("grouped_allreduce_async", _grouped_allreduce, HANDLE)
grouped_allreduce_ = variant(
    "grouped_allreduce_", _grouped_allreduce, GROUP_IN_PLACE, "Grouped allreduce in place; returns the tensors."
)
grouped_allreduce_async_ = variant(
    "grouped_allreduce_async_", _grouped_allreduce, HANDLE_IN_PLACE, "Begins a grouped allreduce in place."
)


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: Any, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Begins the sum or average of sparse tensors. Call the returned function to wait and to get the sparse result."""
    chosen = chosen_op(op, None)
    if chosen not in (Average, Sum):
        raise NotImplementedError("sparse tensors can only be reduced with Average and Sum")
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.sparse_coo:
        what = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ValueError(f"sparse_allreduce_async needs a tensor of layout torch.sparse_coo, not {what}")
    _, ranks = runtime.world.groups.members(process_set)
    # Equal rows are added up first, so that each row is sent once.
    tensor = tensor.detach().coalesce()
    indices = tensor.indices().t().contiguous()
    values = tensor.values().contiguous()
    parts = [
        allgather_async(part, None if name is None else f"{name}.{what}", process_set)
        for part, what in ((indices, "indices"), (values, "values"))
    ]

    def wait() -> torch.Tensor:
        indices, values = [synchronize(handle) for handle in parts]
        if chosen == Average:
            values = values / len(ranks)
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False).coalesce()

    return wait


# --- reducescatter, allgather, broadcast, alltoall -------------------------------------------------------------------


def _reducescatter(
    form: Form[Result], tensor: torch.Tensor, name: str | None = None, op: Any = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Result:  # fmt: skip
    """Begins a reducescatter."""
    return form.end(begin_reducescatter([tensor], name, op, (prescale_factor, postscale_factor), process_set, False))


def _grouped_reducescatter(
    form: Form[Result], tensors: Sequence[torch.Tensor], name: str | None = None, op: Any = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Result:  # fmt: skip
    """Begins reducescatters that become ready together."""
    return form.end(begin_reducescatter(tensors, name, op, (prescale_factor, postscale_factor), process_set, True))


def _allgather(
    form: Form[Result], tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Result:
    """Begins an allgather."""
    return form.end(begin_allgather([tensor], name, process_set, False))


def _grouped_allgather(
    form: Form[Result],
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Result:
    """Begins allgathers that become ready together."""
    return form.end(begin_allgather(tensors, name, process_set, True))


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Broadcast in place; returns `tensor`."""
    result: torch.Tensor = begin_broadcast(tensor, root_rank, name, process_set, True).result()
    return result


def _broadcast(
    form: Form[Result], tensor: torch.Tensor, root_rank: int, name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Result:  # fmt: skip
    """Begins a broadcast."""
    return form.end(begin_broadcast(tensor, root_rank, name, process_set, form.in_place))


def _alltoall(
    form: Form[Result], tensor: torch.Tensor, splits: Any = None, name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Result:  # fmt: skip
    """Begins an alltoall; `synchronize` gives the pair (rows, received splits)."""
    return form.end(begin_alltoall(tensor, splits, name, process_set))


reducescatter_async = variant("reducescatter_async", _reducescatter, HANDLE)
grouped_reducescatter_async = variant("grouped_reducescatter_async", _grouped_reducescatter, HANDLE)
allgather_async = variant("allgather_async", _allgather, HANDLE)
grouped_allgather_async = variant("grouped_allgather_async", _grouped_allgather, HANDLE)
broadcast_async = variant("broadcast_async", _broadcast, HANDLE)
broadcast_async_ = variant("broadcast_async_", _broadcast, HANDLE_IN_PLACE, "Begins a broadcast in place.")
alltoall_async = variant("alltoall_async", _alltoall, HANDLE)


# --- barrier, join ---------------------------------------------------------------------------------------------------


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank of the process set has called it."""
    memory.flush(runtime.world)
    requests.begin_barrier(process_set).result()


def join(device: int = -1) -> int:
    """Declares that this rank has no more data. Until all ranks have joined, it adds zeros to the others' allreduces.

    Gives the rank that joined last. `device` is accepted for compatibility.
    """
    memory.flush(runtime.world)
    del device
    last: int = requests.begin_join().result()
    return last
