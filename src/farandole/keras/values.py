# Reduces, gathers and broadcasts values for callbacks and scripts, outside the training step.
# Touches the rooms engine, operations and world; the files compression and framework.
"""Works on NumPy arrays, numbers, and tensors of any backend; results are NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..engine.interface import ReduceOp
from ..operations import ops
from ..operations.ops import reducescatter as reducescatter_arrays
from ..operations.pending import checked_compression, chosen_op
from ..operations.reductions import Average
from ..world.groups import ProcessSet, global_process_set
from .compression import Compression
from .framework import array_of, assign, require


def allreduce(
    value: Any, name: str | None = None, average: bool | None = True, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, op: Any = None, compression: Any = Compression.none,
) -> Any:  # fmt: skip
    """The reduction of all ranks' values; the average if `op` is not given."""
    chosen = chosen_op(op, False if average is not None and not average else None)  # True is the default
    reduce = reduction(name, chosen, prescale_factor, postscale_factor)
    if compression is Compression.none:
        return reduce(array_of(value))
    convert = require().ops
    return compressed(value, compression, convert.convert_to_tensor, convert.convert_to_numpy, reduce)


Conversion = Callable[[Any], Any]


def reduction(name: str | None, op: ReduceOp, prescale_factor: float, postscale_factor: float) -> Conversion:
    """A function that reduces an array over all ranks."""
    return lambda array: ops.allreduce(array, None, name, op, prescale_factor, postscale_factor)


def compressed(value: Any, compression: Any, tensor: Conversion, array: Conversion, reduce: Conversion) -> Any:
    """Applies `reduce` to the value's array in the form in which a compressor of tensors sends it."""
    packed, ctx = checked_compression(compression).compress(tensor(value))
    return array(compression.decompress(tensor(reduce(array(packed))), ctx))


def allgather(value: Any, name: str | None = None) -> Any:
    """The values of all ranks, concatenated along the first dimension."""
    return ops.allgather(array_of(value), name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """The root's value on every rank."""
    return ops.broadcast(array_of(value), root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: Any = Average) -> Any:
    """This rank's rows of the reduction."""
    return reducescatter_arrays(array_of(value), name, op)


def broadcast_variables(variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Copies the root's values to variables of any backend; all broadcasts run at the same time."""
    # By index, not by name: Keras numbers its layers, and a rank may have made other layers before.
    arrays = [np.array(array_of(variable), order="C") for variable in variables]
    handles = [
        ops.broadcast_async_(_as_sendable(array), root_rank, f"keras.variables.{index}", process_set)
        for index, array in enumerate(arrays)
    ]
    failure: Exception | None = None
    for handle in handles:
        try:
            ops.synchronize(handle)
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
    for variable, array in zip(variables, arrays, strict=True):
        assign(variable, array)


def _as_sendable(array: Any) -> Any:
    """The same memory in a type that can be sent; as bytes for types that cannot (uint32, uint64)."""
    if array.dtype.kind == "u" and array.dtype.itemsize > 2:
        return array.reshape(-1).view(np.uint8)
    return array


def broadcast_global_variables(root_rank: int) -> None:
    """RuntimeError: Keras 3 has no global variables; the callback broadcasts the variables of a model."""
    raise RuntimeError(
        "there are no global variables in Keras 3: pass BroadcastGlobalVariablesCallback(0) to model.fit, or call "
        "broadcast_variables(model.variables, root_rank=0)"
    )
