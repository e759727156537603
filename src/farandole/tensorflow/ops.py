# The operations on tensors in eager mode, in tf.function and in graphs for sessions, with gradients.
# Touches TensorFlow; the rooms bindings, engine, operations and world; other files of this room.
"""Operations with the names, arguments and rules of Horovod. Each gradient is a collective too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..bindings.work import Work, check
from ..engine.interface import Kind, ReduceOp
from ..operations import ops as arrays_ops
from ..operations import requests
from ..operations.pending import checked_compression, checked_scales, chosen_op
from ..operations.reductions import Adasum, Average, Sum
from ..world.basics import local_rank, local_size, rank
from ..world.groups import ProcessSet, global_process_set
from ..world.runtime import runtime
from . import naming
from .compression import Compression
from .failures import GraphAborted, GraphArgument, with_tensorflow_classes
from .framework import tf
from .host import asked
from .way import carry_out, collectives_before, compiled_now, work_of

# --- how each is carried out -----------------------------------------------------------------------------------------


def _dense(tensor: Any) -> Any:
    if isinstance(tensor, tf.Tensor):
        return tensor
    return tf.convert_to_tensor(tensor)


def run(work: Work, tensors: Sequence[Any], splits: Any = None, ignore_name_scope: bool = False) -> list[Any]:
    """The outputs, with gradients; for an alltoall, the rows and the received splits."""
    with with_tensorflow_classes():
        return _run(work, tensors, splits, ignore_name_scope)


def _run(work: Work, tensors: Sequence[Any], splits: Any, ignore_name_scope: bool) -> list[Any]:
    dense = [_dense(tensor) for tensor in tensors]
    check(work, "tensors", dense)
    if not dense:
        return []
    if not tf.executing_eagerly() and work.names is None:
        work = replace(work, name=naming.in_graph(work.label, work.name, dense[0], ignore_name_scope))

    if compiled_now():
        return carry_out(work, dense, splits)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(*inputs: Any) -> Any:
        outputs = carry_out(work, inputs, splits)
        return outputs, lambda *grads: _backward(work, inputs, outputs, grads)

    found = differentiable(*dense)
    return list(found) if isinstance(found, (list, tuple)) else [found]


# The gradient of a node is registered. tf.custom_gradient would keep the inputs, and an input that is kept cannot be
# reused for the result.
@tf.RegisterGradient("FarandoleCollective")  # type: ignore[untyped-decorator]
def _through_collective(node: Any, *grads: Any) -> list[Any]:
    return [None, *_backward(work_of(node), node.inputs[1:], node.outputs, grads)]


@tf.RegisterGradient("FarandoleAlltoall")  # type: ignore[untyped-decorator]
def _through_alltoall(node: Any, *grads: Any) -> list[Any]:
    return [None, *_backward(work_of(node), node.inputs[1:2], node.outputs, grads), None]


def _backward(work: Work, inputs: Sequence[Any], outputs: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
    # Integers have no gradient: the received splits of an alltoall have None.
    grads = [
        tf.zeros_like(output) if grad is None else _dense(grad) for grad, output in zip(gradients, outputs, strict=True)
    ]
    again = replace(work, name=None, names=None, grouped=work.grouped or work.names is not None)
    if work.kind == Kind.ALLREDUCE:
        return run(again, grads)
    average = replace(again, kind=Kind.ALLREDUCE, op=Average, scales=(1.0, 1.0))
    if work.kind == Kind.BROADCAST:
        at_root = tf.equal(rank_op(), work.root)  # in a graph for sessions, == tests whether both are the same tensor
        return [tf.where(at_root, grad, tf.zeros_like(grad)) for grad in run(average, grads)]
    if work.kind == Kind.ALLGATHER:
        return _own_rows(work, inputs, run(average, grads))
    if work.kind == Kind.REDUCESCATTER:
        factor = work.scales[0] * work.scales[1]
        if work.op == Sum:
            factor = factor * tf.cast(_members_op(work.process_set), tf.float64)
        scaled = [grad * tf.cast(factor, grad.dtype) for grad in grads]
        return run(replace(again, kind=Kind.ALLGATHER, op=Sum, scales=(1.0, 1.0)), scaled)
    rows, _ = run(again, grads[:1], outputs[1])
    # Rows beyond the sum of the splits were not sent.
    left = tf.shape(inputs[0])[0] - tf.shape(rows)[0]
    return [tf.concat([rows, tf.zeros(tf.concat([[left], tf.shape(rows)[1:]], 0), rows.dtype)], 0)]


def _own_rows(work: Work, inputs: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
    """This rank's part of the gradients of gathered tensors."""
    rows = tf.stack([tf.shape(tensor)[0] for tensor in inputs])
    rows_of_all = run(Work(Kind.ALLGATHER, process_set=work.process_set), [rows[tf.newaxis]])[0]
    member = asked(lambda: work.process_set.rank(), tf.int32, None)
    before = tf.reduce_sum(rows_of_all[:member], 0)
    return [grad[before[i] : before[i] + rows[i]] for i, grad in enumerate(grads)]


def _members_op(process_set: ProcessSet) -> Any:
    return asked(lambda: process_set.size(), tf.int32, None)


# --- allreduce -------------------------------------------------------------------------------------------------------


def _compressed(work: Work, tensors: Sequence[Any], compression: Any, ignore_name_scope: bool) -> list[Any]:
    """The outputs of the work on tensors that a compressor packs and unpacks."""
    packed = [checked_compression(compression).compress(_dense(tensor)) for tensor in tensors]
    reduced = run(work, [tensor for tensor, _ in packed], None, ignore_name_scope)
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, packed, strict=True)]


def _allreduce(work: Work, tensors: Sequence[Any], compression: Any, ignore_name_scope: bool) -> list[Any]:
    sparse = [index for index, tensor in enumerate(tensors) if isinstance(tensor, tf.IndexedSlices)]
    if sparse:
        _check_sparse(work.op, work.scales)
    dense = [tensor for index, tensor in enumerate(tensors) if index not in sparse]
    result = _compressed(work, dense, compression, ignore_name_scope)
    for index in sparse:  # in ascending order, so that each is inserted at the right index
        single = replace(work, name=f"{work.name}.{index}") if work.grouped and work.name else work
        result.insert(index, _sparse_allreduce(single, tensors[index], compression, ignore_name_scope))
    return result


def _check_sparse(op: ReduceOp, scales: tuple[float, float]) -> None:
    if op == Adasum:
        raise NotImplementedError("Adasum does not take tf.IndexedSlices; use sparse_as_dense=True")
    if op not in (Average, Sum):
        raise NotImplementedError("tf.IndexedSlices can only be reduced with Average and Sum")
    if scales != (1.0, 1.0):
        raise NotImplementedError("prescale_factor and postscale_factor are not supported for tf.IndexedSlices")


def _sparse_allreduce(work: Work, slices: Any, compression: Any, ignore_name_scope: bool) -> Any:
    """Two allgathers. Rows that occur on several ranks stay separate; code that uses the slices adds them."""
    name, process_set = work.name, work.process_set
    sent, ctx = checked_compression(compression).compress(_dense(slices.values))
    rows = allgather(sent, name and f"{name}.values", ignore_name_scope, process_set)
    values = compression.decompress(rows, ctx)
    indices = allgather(slices.indices, name and f"{name}.indices", ignore_name_scope, process_set)
    if work.op == Average:
        values = values / tf.cast(_members_op(process_set), values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _reduction(
    name: str | None, op: Any, average: bool | None, scales: tuple[float, float], process_set: ProcessSet,
    grouped: bool = False,
) -> Work:  # fmt: skip
    """What an allreduce is asked to do. The public functions call this; its warning names the line of their caller."""
    return Work(Kind.ALLREDUCE, name, chosen_op(op, average), checked_scales(scales), process_set, grouped=grouped)


def allreduce(
    tensor: Any, average: bool | None = None, device_dense: str = "", device_sparse: str = "",
    compression: Any = Compression.none, op: Any = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    name: str | None = None, process_set: ProcessSet = global_process_set, ignore_name_scope: bool = False,
) -> Any:  # fmt: skip
    """The reduction of all ranks' tensors on every rank; the average if `op` is not given.

    For tf.IndexedSlices the result is tf.IndexedSlices. `device_dense` and `device_sparse` are accepted for
    compatibility.
    """
    work = _reduction(name, op, average, (prescale_factor, postscale_factor), process_set)
    return _allreduce(work, [tensor], compression, ignore_name_scope)[0]


def grouped_allreduce(
    tensors: Sequence[Any], average: bool | None = None, device_dense: str = "", device_sparse: str = "",
    compression: Any = Compression.none, op: Any = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set, ignore_name_scope: bool = False, name: str | None = None,
) -> list[Any]:  # fmt: skip
    """Allreduce of several tensors that become ready together; each tf.IndexedSlices is gathered by itself."""
    work = _reduction(name, op, average, (prescale_factor, postscale_factor), process_set, grouped=True)
    return _allreduce(work, list(tensors), compression, ignore_name_scope)


# --- reducescatter ---------------------------------------------------------------------------------------------------


def _scatter_op(op: Any) -> ReduceOp:
    chosen = chosen_op(op, None)
    if chosen not in (Average, Sum):
        raise GraphAborted(None, None, "Reducescatter currently only supports Average and Sum")
    return chosen


def reducescatter(
    tensor: Any, device_dense: str = "", compression: Any = Compression.none, op: Any = Average,
    name: str | None = None, process_set: ProcessSet = global_process_set, ignore_name_scope: bool = False,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Any:  # fmt: skip
    """This rank's rows of the reduction; the first `rows % size` ranks get one more row."""
    scales = checked_scales((prescale_factor, postscale_factor))
    work = Work(Kind.REDUCESCATTER, name, _scatter_op(op), scales, process_set)
    return _compressed(work, [tensor], compression, ignore_name_scope)[0]


def grouped_reducescatter(
    tensors: Sequence[Any], device_dense: str = "", compression: Any = Compression.none, op: Any = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[Any]:  # fmt: skip
    """Reducescatter of several tensors that become ready together."""
    scales = checked_scales((prescale_factor, postscale_factor))
    work = Work(Kind.REDUCESCATTER, name, _scatter_op(op), scales, process_set, grouped=True)
    return _compressed(work, list(tensors), compression, ignore_name_scope=False)


# --- allgather, broadcast, alltoall ----------------------------------------------------------------------------------


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The tensors of all ranks, concatenated along the first dimension, which may differ between ranks."""
    return run(Work(Kind.ALLGATHER, name, process_set=process_set), [tensor], None, ignore_name_scope)[0]


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Allgather of several tensors that become ready together."""
    work = Work(Kind.ALLGATHER, name, process_set=process_set, grouped=True)
    return run(work, list(tensors), None, ignore_name_scope)


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The root's tensor on every rank. `root_rank` is a rank of the job."""
    with with_tensorflow_classes():
        _, ranks = runtime.world.groups.members(process_set)
        requests.member(root_rank, ranks, "root_rank")
    work = Work(Kind.BROADCAST, name, process_set=process_set, root=root_rank)
    return run(work, [tensor], None, ignore_name_scope)[0]


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends `splits[i]` rows to member i and gives the received rows; with `splits`, also the received splits."""
    if splits is not None and not tf.executing_eagerly():
        splits = tf.convert_to_tensor(splits)
        if not splits.dtype.is_integer:
            raise GraphArgument(None, None, f"splits are of {splits.dtype.name}; expected whole numbers")
    work = Work(Kind.ALLTOALL, name, process_set=process_set)
    rows, received = run(work, [tensor], splits, ignore_name_scope)
    return rows if splits is None else (rows, received)


# --- barrier, join, ranks and sizes ----------------------------------------------------------------------------------


def barrier(process_set: ProcessSet = global_process_set) -> Any:
    """Returns when every rank of the process set has called it; in a graph, a node that ends then."""
    if tf.executing_eagerly():
        return arrays_ops.barrier(process_set)

    def wait() -> int:
        arrays_ops.barrier(process_set)
        return 0

    with tf.control_dependencies(collectives_before()):
        return asked(wait, tf.int32, "HorovodBarrier").op


def join() -> Any:
    """Declares that this rank has no more data. Until all have joined, it adds zeros to the others' allreduces.

    Gives the rank that joined last.
    """
    if tf.executing_eagerly():
        return asked(arrays_ops.join, tf.int32, None)
    with tf.control_dependencies(collectives_before()):
        return asked(arrays_ops.join, tf.int32, "HorovodJoin")


def rank_op(name: str | None = None) -> Any:
    """This process's rank, read when the node runs: it changes in an elastic job."""
    return asked(rank, tf.int32, name)


def local_rank_op(name: str | None = None) -> Any:
    """This process's local rank, read when the node runs."""
    return asked(local_rank, tf.int32, name)


def local_size_op(name: str | None = None) -> Any:
    """The number of processes on this host, read when the node runs."""
    return asked(local_size, tf.int32, name)


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """The number of ranks of a process set, read when the node runs."""
    return asked(lambda: len(runtime.world.groups.numbered(process_set_id)), tf.int32, name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """1 if this process is in the process set, otherwise 0; read when the node runs."""
    return asked(lambda: int(rank() in runtime.world.groups.numbered(process_set_id)), tf.int32, name)
