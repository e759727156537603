# The operations on MXNet's arrays, with the names, arguments and rules of Horovod.
# Touches MXNet; operations, which makes the requests, and world; the files access, framework and memory.
"""Operations return when they are done, and raise their errors. See access.py for why MXNet's engine is not used.

`priority` is accepted for compatibility; operations begin in the order of the calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ..operations import requests
from ..operations.arrays import Buffer
from ..operations.forms import variant
from ..operations.pending import Submission, chosen_op
from ..operations.reductions import Average, Sum
from ..world.groups import ProcessSet, global_process_set
from .access import locate
from .framework import mx
from .memory import ArrayBuffer, moved, on_host

__all__ = [
    "allgather",
    "allreduce",
    "allreduce_",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "join",
    "reducescatter",
]

Build = Callable[[list[Buffer]], Submission]


def _done(tensors: Sequence[Any], in_place: bool, build: Build) -> list[Any]:
    """Runs the submission that `build` makes from the arrays, and gives the results."""
    return _Call(tensors, in_place, build).results()


NEW_ARRAY, IN_PLACE = False, True  # the first argument of the operations that have both variants


class _Call:
    """A collective that has begun."""

    def __init__(self, tensors: Sequence[Any], in_place: bool, build: Build) -> None:
        self._tensors, self._in_place = tensors, in_place
        self._near = [on_host(tensor) for tensor in tensors]
        self._begun = build([ArrayBuffer(array) for array in self._near])
        self._begun.finish = list  # results are already where they belong
        if self._begun.requests:
            locate(self._begun.requests)
            self._begun.submit()

    def results(self) -> list[Any]:
        """Waits and gives the arrays."""
        if not self._begun.requests:
            return []
        self._begun.result()
        results = []
        for tensor, host, request in zip(self._tensors, self._near, self._begun.requests, strict=True):
            output: Any = request.output
            if self._in_place and host is not tensor:
                output.owner.copyto(tensor)
            results.append(tensor if self._in_place else moved(output.owner, tensor.ctx))
        return results


def _received(tensors: Sequence[Any], build: Build) -> tuple[list[Any], list[Any]]:
    """Runs the submission that `build` makes from the arrays, for results of other shapes; gives both."""
    buffers: list[Buffer] = [ArrayBuffer(on_host(tensor)) for tensor in tensors]
    begun = build(buffers)
    if not begun.requests:
        return [], []
    locate(begun.requests)
    begun.finish = list
    outcomes = begun.result()
    results = [
        moved(buffer.give(outcome.output), tensor.ctx)
        for buffer, outcome, tensor in zip(buffers, outcomes, tensors, strict=True)
    ]
    return results, outcomes


# --- operations that reduce; their variants differ in `in_place` -----------------------------------------------------


def _allreduce(
    in_place: bool, tensor: Any, average: bool | None = None, name: str | None = None, priority: int = 0,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
    op: Any = None,
) -> Any:  # fmt: skip
    """The reduction of all ranks' arrays, as a new array; the average if `op` is not given."""
    chosen, scales = chosen_op(op, average), (prescale_factor, postscale_factor)

    def build(buffers: list[Buffer]) -> Submission:
        return requests.begin_allreduce(
            buffers, name, chosen, scales, process_set, None, grouped=False, in_place=in_place
        )

    return _done([tensor], in_place, build)[0]


allreduce = variant("allreduce", _allreduce, NEW_ARRAY)
allreduce_ = variant("allreduce_", _allreduce, IN_PLACE, "Allreduce in place; returns `tensor`.")


def _grouped_allreduce(
    in_place: bool, tensors: Sequence[Any], average: bool | None = None, name: str | None = None, priority: int = 0,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
    op: Any = None,
) -> list[Any]:  # fmt: skip
    """Allreduce of several arrays that become ready together."""
    chosen, scales = chosen_op(op, average), (prescale_factor, postscale_factor)

    def build(buffers: list[Buffer]) -> Submission:
        return requests.begin_allreduce(
            buffers, name, chosen, scales, process_set, None, grouped=True, in_place=in_place
        )

    return _done(tensors, in_place, build)


grouped_allreduce = variant("grouped_allreduce", _grouped_allreduce, NEW_ARRAY)
grouped_allreduce_ = variant(
    "grouped_allreduce_", _grouped_allreduce, IN_PLACE, "Grouped allreduce in place; returns the arrays."
)


def sum_each(named: Sequence[tuple[str, Any]], prescale: float, process_set: ProcessSet) -> None:
    """Allreduces of several arrays in place, each with its own name, all at the same time."""

    def build(name: str, buffers: list[Buffer]) -> Submission:
        return requests.begin_allreduce(
            buffers, name, Sum, (prescale, 1.0), process_set, None, grouped=False, in_place=True
        )

    failure: Exception | None = None
    calls: list[_Call] = []
    try:
        for name, tensor in named:
            calls.append(_Call([tensor], True, functools.partial(build, name)))
    except Exception as error:
        failure = error
    for call in calls:  # all of them, also after a failure, so that nothing stays pending
        try:
            call.results()
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure


def reducescatter(
    tensor: Any, op: Any = Average, name: str | None = None, priority: int = 0,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Any:  # fmt: skip
    """This rank's rows of the reduction; the first `rows % size` ranks get one more row."""
    scales = (prescale_factor, postscale_factor)
    return _done(
        [tensor],
        False,
        lambda own: requests.begin_reducescatter(own, name, op, scales, process_set, None, grouped=False),
    )[0]


def grouped_reducescatter(
    tensors: Sequence[Any], op: Any = Average, name: str | None = None, priority: int = 0,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> list[Any]:  # fmt: skip
    """Reducescatter of several arrays that become ready together."""
    scales = (prescale_factor, postscale_factor)
    return _done(
        tensors, False, lambda own: requests.begin_reducescatter(own, name, op, scales, process_set, None, grouped=True)
    )


# --- operations that move data ---------------------------------------------------------------------------------------


def _broadcast(
    in_place: bool, tensor: Any, root_rank: int, name: str | None = None, priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:  # fmt: skip
    """The root's array, as a new array on every rank. `root_rank` is a rank of the job."""

    def build(buffers: list[Buffer]) -> Submission:
        return requests.begin_broadcast(buffers[0], root_rank, name, process_set, None, in_place)

    return _done([tensor], in_place, build)[0]


broadcast = variant("broadcast", _broadcast, NEW_ARRAY)
broadcast_ = variant("broadcast_", _broadcast, IN_PLACE, "Broadcast in place; returns `tensor`.")


def allgather(
    tensor: Any, name: str | None = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> Any:
    """The arrays of all ranks, concatenated along the first dimension, which may differ between ranks."""
    return _received([tensor], lambda own: requests.begin_allgather(own, name, process_set, None, grouped=False))[0][0]


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Allgather of several arrays that become ready together."""
    return _received(tensors, lambda own: requests.begin_allgather(own, name, process_set, None, grouped=True))[0]


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends `splits[i]` rows to member i and gives the received rows; with `splits`, also the received splits."""
    rows = splits.asnumpy().tolist() if isinstance(splits, mx.nd.NDArray) else splits

    def build(own: list[Buffer]) -> Submission:
        return requests.begin_alltoall(own[0], rows, name, process_set, None, pair=False)

    [result], [outcome] = _received([tensor], build)
    if splits is None:
        return result
    numbers = mx.np if isinstance(tensor, mx.np.ndarray) else mx.nd
    return result, numbers.array(outcome.splits, dtype="int32")


# --- barrier, join ---------------------------------------------------------------------------------------------------


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank of the process set has called it."""
    requests.begin_barrier(process_set).result()


def join(device: int = -1) -> int:
    """Declares that this rank has no more data. Until all have joined, it adds zeros to the others' allreduces.

    Gives the rank that joined last. `device` is accepted for compatibility.
    """
    del device
    last: int = requests.begin_join().result()
    return last
