# Python objects between ranks: broadcast_object and allgather_object, by pickle.
# Touches the rooms engine and world. Sends pickles only over the engine's links, which know the job's secret.
"""Slower than arrays, because objects are pickled and unpickled."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np

from ..engine.interface import Array
from ..world.groups import ProcessSet, global_process_set
from ..world.runtime import runtime
from . import ops

_UNPICKLABLE = -1  # sent instead of a size, so that other ranks do not wait for missing bytes


def _dump(value: Any, to: io.BytesIO) -> None:
    try:
        pickle.dump(value, to, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:
        # Lambdas and classes of __main__ need cloudpickle; its output loads without it.
        try:
            import cloudpickle  # type: ignore[import-not-found, import-untyped, unused-ignore]
        except ImportError:
            pass
        else:
            to.seek(0)
            to.truncate()
            cloudpickle.dump(value, to)
            return
        raise


def _packed(value: Any) -> tuple[Array, Exception | None]:
    to = io.BytesIO()
    try:
        _dump(value, to)
    except Exception as error:
        return np.empty(0, dtype=np.uint8), error
    return np.frombuffer(to.getbuffer(), dtype=np.uint8), None


def dumps(value: Any) -> bytes:
    """An object as bytes, for `loads` on another rank of the job."""
    to = io.BytesIO()
    _dump(value, to)
    return to.getvalue()


def loads(data: Any) -> Any:
    """The object from the bytes of another rank of the job; never use it for other bytes."""
    return pickle.loads(data)


def _part(name: str | None, part: str) -> str | None:
    return None if name is None else f"{name}.{part}"


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The root's object on every rank; what the others pass is ignored."""
    is_root = runtime.world.engine.rank == root_rank
    data, failure = _packed(obj) if is_root else (np.empty(0, dtype=np.uint8), None)
    size = np.array([data.size if failure is None else _UNPICKLABLE], dtype=np.int64)
    count = int(ops.broadcast(size, root_rank, _part(name, "sz"), process_set)[0])
    if failure is not None:
        raise failure
    if count == _UNPICKLABLE:
        raise ValueError(f"rank {root_rank} could not pickle the object it wanted to broadcast")
    if is_root:
        ops.broadcast_(data, root_rank, _part(name, "t"), process_set)
        return obj
    data = np.empty(count, dtype=np.uint8)
    ops.broadcast_(data, root_rank, _part(name, "t"), process_set)
    return pickle.loads(data.data)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Every rank's object, in the order of ranks, on every rank."""
    data, failure = _packed(obj)
    size = np.array([data.size if failure is None else _UNPICKLABLE], dtype=np.int64)
    sizes = ops.allgather(size, _part(name, "sz"), process_set)
    if failure is not None:
        raise failure
    if sizes.min() == _UNPICKLABLE:
        rank = int(sizes.argmin())
        raise ValueError(f"member {rank} of the process set could not pickle its object")
    everything = ops.allgather(data, _part(name, "t"), process_set)
    ends = np.cumsum(sizes)
    return [pickle.loads(everything[end - count : end].data) for end, count in zip(ends, sizes, strict=True)]
