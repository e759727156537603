# The operations on arrays and trees of arrays: directly, and inside jit, grad, vmap and scan.
# Touches JAX; the rooms base, bindings, engine, operations and world; other files of this room.
"""Operations with the names and rules of Horovod. A tree of arrays is sent in one call; the result is a tree too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..base.errors import HorovodInternalError
from ..bindings.work import Work
from ..engine.interface import Kind
from ..operations import ops as arrays_ops
from ..operations import requests
from ..operations.pending import checked_compression, checked_scales, chosen_op
from ..operations.reductions import Average, Sum
from ..world.groups import ProcessSet, global_process_set
from ..world.runtime import runtime
from .compression import Compression
from .failures import settle
from .framework import jax
from .running import run


def _on_tree(work: Work, tree: Any) -> Any:
    """Runs the work on all arrays of the tree in one call, and gives the tree of the outputs."""
    leaves, shape = jax.tree.flatten(tree)
    alone = jax.tree.structure(0) == shape
    if not alone:
        work = replace(work, grouped=True)
    return jax.tree.unflatten(shape, run(work, leaves))


def _listed(tensors: Sequence[Any]) -> list[Any]:
    """The arrays of a group. TypeError for None, which would be an empty tree in JAX."""
    found = list(tensors)
    if any(one is None for one in found):
        raise TypeError("a group has None among its arrays; expected arrays")
    return found


# --- allreduce and reducescatter -------------------------------------------------------------------------------------


def _reduced(work: Work, tree: Any, compression: Any) -> Any:
    checked_compression(compression)
    if compression is Compression.none:
        return _on_tree(work, tree)
    leaves, shape = jax.tree.flatten(tree)
    packed = [compression.compress(jax.numpy.asarray(leaf)) for leaf in leaves]
    sent = jax.tree.unflatten(shape, [array for array, _ in packed])
    found = jax.tree.leaves(_on_tree(work, sent))
    back = [compression.decompress(array, ctx) for array, (_, ctx) in zip(found, packed, strict=True)]
    return jax.tree.unflatten(shape, back)


def _allreduce(
    tree: Any,
    average: bool | None,
    name: str | None,
    compression: Any,
    op: Any,
    scales: tuple[float, float],
    process_set: ProcessSet,
) -> Any:
    work = Work(Kind.ALLREDUCE, name, chosen_op(op, average), checked_scales(scales), process_set)
    return _reduced(work, tree, compression)


def allreduce(
    tensor: Any, average: bool | None = None, name: str | None = None, compression: Any = Compression.none,
    op: Any = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:  # fmt: skip
    """The reduction of all ranks' arrays on every rank; the average if `op` is not given.

    `tensor` is an array, or a tree of arrays, which is sent in one call.
    """
    scales = prescale_factor, postscale_factor
    return _allreduce(tensor, average, name, compression, op, scales, process_set)


def grouped_allreduce(
    tensors: Sequence[Any], average: bool | None = None, name: str | None = None, compression: Any = Compression.none,
    op: Any = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:  # fmt: skip
    """Allreduce of several arrays that become ready together."""
    scales = prescale_factor, postscale_factor
    return list(_allreduce(_listed(tensors), average, name, compression, op, scales, process_set))


def reducescatter(
    tensor: Any, name: str | None = None, compression: Any = Compression.none, op: Any = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Any:  # fmt: skip
    """This rank's rows of the reduction; the first `rows % size` ranks get one more row."""
    chosen = chosen_op(op, None)
    if chosen not in (Average, Sum):
        raise HorovodInternalError("Reducescatter currently only supports Average and Sum")
    work = Work(Kind.REDUCESCATTER, name, chosen, checked_scales((prescale_factor, postscale_factor)), process_set)
    return _reduced(work, tensor, compression)


def grouped_reducescatter(
    tensors: Sequence[Any], name: str | None = None, compression: Any = Compression.none, op: Any = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> list[Any]:  # fmt: skip
    """Reducescatter of several arrays that become ready together."""
    scales = prescale_factor, postscale_factor
    return list(reducescatter(_listed(tensors), name, compression, op, process_set, *scales))


# --- allgather, broadcast, alltoall ----------------------------------------------------------------------------------


def allgather(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """The arrays of all ranks, concatenated along the first dimension; for a tree, each of its arrays.

    The first dimension may differ between ranks, but in compiled functions it must be equal.
    """
    return _on_tree(Work(Kind.ALLGATHER, name, process_set=process_set), tensor)


def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Allgather of several arrays that become ready together."""
    return list(allgather(_listed(tensors), name, process_set))


def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The root's array, or tree of arrays, on every rank. `root_rank` is a rank of the job."""
    _, ranks = runtime.world.groups.members(process_set)
    requests.member(root_rank, ranks, "root_rank")
    work = Work(Kind.BROADCAST, name, process_set=process_set, root=root_rank)
    leaves, shape = jax.tree.flatten(tensor)
    if jax.tree.structure(0) != shape:
        prefix = "jax" if name is None else name
        names = tuple(f"{prefix}_{index}of{len(leaves)}" for index in range(1, len(leaves) + 1))
        work = replace(work, name=prefix, names=names)
    return jax.tree.unflatten(shape, run(work, leaves))


def alltoall(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Sends `splits[i]` rows to member i and gives the received rows; with `splits`, also the received splits.

    Compiled functions support no splits: all members get the same number of rows.
    """
    work = Work(Kind.ALLTOALL, name, process_set=process_set)
    if splits is None:
        return run(work, [tensor])[0]
    rows, received = run(work, [tensor], np.asarray(splits).tolist())
    return rows, received


# --- barrier, join ---------------------------------------------------------------------------------------------------


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank of the process set has called it; not for compiled functions."""
    settle()
    arrays_ops.barrier(process_set)


def join() -> int:
    """Declares that this rank has no more data. Until all have joined, it adds zeros to the others' allreduces.

    Gives the rank that joined last; not for compiled functions.
    """
    settle()
    return int(arrays_ops.join())
