# A collective call as data, for bindings with graphs, and how the NumPy layer begins it.
# Touches NumPy; the rooms engine, operations and world. Uses no tensors of frameworks.
"""`Work` says what to do with arrays that come later: at once in eager mode, or each time a graph runs."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ..engine.interface import NAMES, Array, Kind, Outcome, ReduceOp, unsupported
from ..operations import requests
from ..operations.pending import Submission, names_of
from ..world.groups import ProcessSet, global_process_set
from ..world.runtime import runtime
from ..world.world import World

_lock = threading.Lock()
_unnamed: WeakKeyDictionary[World, Any] = WeakKeyDictionary()  # counters, by framework, group and kind


@dataclass(frozen=True)
class Work:
    """One call. `grouped`: its tensors become ready together, under one name.

    `names`: each tensor is an independent operation; only the call is common.
    """

    kind: Kind
    name: str | None = None
    op: ReduceOp = ReduceOp.SUM
    scales: tuple[float, float] = (1.0, 1.0)
    process_set: ProcessSet = global_process_set
    root: Any = -1
    grouped: bool = False
    names: tuple[str, ...] | None = None

    @property
    def label(self) -> str:
        """Horovod's name for such nodes."""
        return f"Horovod{self.kind.name.capitalize()}"


def check(work: Work, what: str, tensors: Sequence[Any]) -> None:
    """TypeError or ValueError for a call that must fail now, and not when a graph runs. `what`: tensors or arrays."""
    names_of("name", work.name)
    runtime.world.groups.members(work.process_set)
    for tensor in tensors:
        if tensor.dtype.name not in NAMES:
            raise unsupported(what, tensor.dtype.name)


def own_name(framework: str, name: str) -> str:
    """Makes the names of different frameworks in one process different."""
    return f"{framework}.{name}"


def begin(framework: str, work: Work, arrays: Sequence[Any], splits: Any = None) -> Submission:
    """The requests for a framework's call on these arrays."""
    begun = _begun(work, arrays, splits)
    for request in begun.requests:
        name = request.name
        if name is None:
            with _lock:
                counts = _unnamed.setdefault(begun.world, defaultdict(lambda: itertools.count(1)))
                name = f"{request.kind.name.lower()}.noname.{next(counts[framework, request.group, request.kind])}"
        request.name = own_name(framework, name)
    return begun


def _begun(work: Work, arrays: Sequence[Any], splits: Any) -> Submission:
    if work.names is not None:
        return _merged([_single(work, name, array) for name, array in zip(work.names, arrays, strict=True)])
    if work.kind == Kind.ALLTOALL:
        begun = requests.begin_alltoall(arrays[0], splits, work.name, work.process_set, None, pair=False)
        give = begun.finish
        begun.finish = lambda outcomes: (give(outcomes), np.asarray(outcomes[0].splits, dtype=np.int32))
        return begun
    if not work.grouped:
        return _single(work, work.name, arrays[0])
    if work.kind == Kind.ALLREDUCE:
        return requests.begin_allreduce(
            arrays, work.name, work.op, work.scales, work.process_set, None, grouped=True, in_place=False
        )
    if work.kind == Kind.REDUCESCATTER:
        return requests.begin_reducescatter(
            arrays, work.name, work.op, work.scales, work.process_set, None, grouped=True
        )
    return requests.begin_allgather(arrays, work.name, work.process_set, None, grouped=True)


def _single(work: Work, name: str | None, array: Any) -> Submission:
    if work.kind == Kind.ALLREDUCE:
        return requests.begin_allreduce(
            [array], name, work.op, work.scales, work.process_set, None, grouped=False, in_place=False
        )
    if work.kind == Kind.REDUCESCATTER:
        return requests.begin_reducescatter([array], name, work.op, work.scales, work.process_set, None, grouped=False)
    if work.kind == Kind.BROADCAST:
        return requests.begin_broadcast(array, work.root, name, work.process_set, None, in_place=False)
    return requests.begin_allgather([array], name, work.process_set, None, grouped=False)


def _merged(parts: list[Submission]) -> Submission:
    """Joins independent operations of one tensor each, to submit them in one call."""

    def finish(outcomes: list[Outcome]) -> Any:
        return tuple(part.finish([outcome]) for part, outcome in zip(parts, outcomes, strict=True))

    return Submission(parts[0].world, [part.requests[0] for part in parts], finish)


def results(work: Work, begun: Submission) -> list[Array]:
    """Waits and gives the outputs as a list; for an alltoall, the rows and the received splits."""
    found = begun.result()
    return list(found) if work.grouped or work.names is not None or work.kind == Kind.ALLTOALL else [found]
