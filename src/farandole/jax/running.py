# Runs a collective on JAX's arrays: concrete ones at once, traced ones as a step of the program; with gradients.
# Touches JAX; the rooms base, bindings, engine, operations and world; the files framework, host and primitive.
"""`run(work, arrays)` gives the outputs. Each gradient is a collective too, as in the other bindings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..base.errors import no_rows
from ..bindings.work import Work, check
from ..engine.interface import Kind
from ..operations import ops as arrays_ops
from ..operations.reductions import Average, Sum
from ..world.basics import rank
from ..world.runtime import runtime
from . import host, primitive
from .framework import jax

jnp: Any = jax.numpy


def traced(arrays: Sequence[Any]) -> bool:
    """Whether at least one of these is a placeholder in a function that is being transformed."""
    return any(isinstance(array, jax.core.Tracer) for array in arrays)


def run(work: Work, arrays: Sequence[Any], splits: Any = None) -> list[Any]:
    """The outputs, with gradients; for an alltoall with splits, the rows and the received splits."""
    inputs = [_array(array) for array in arrays]
    check(work, "arrays", inputs)
    if not inputs:
        return []
    for array in inputs:
        if array.ndim == 0 and work.kind not in (Kind.ALLREDUCE, Kind.BROADCAST):
            raise no_rows(work.kind.name.lower())
    if not traced(inputs):
        return host.carry_out(work, inputs, splits)
    return _differentiable(work, inputs, splits)


def _array(array: Any) -> Any:
    return array if isinstance(array, jax.Array) else jnp.asarray(array)


def _differentiable(work: Work, inputs: list[Any], splits: Any) -> list[Any]:
    shapes = [array.shape for array in inputs]

    def forward(arrays: list[Any]) -> list[Any]:
        if not traced(arrays):
            return host.carry_out(work, arrays, splits)
        if splits is not None:
            raise ValueError("in a compiled function alltoall takes no splits: XLA has to know all shapes beforehand")
        return primitive.bind(work, arrays)

    def forward_with_residuals(arrays: list[Any]) -> tuple[list[Any], Any]:
        outputs = forward(arrays)
        return outputs, outputs[1] if splits is not None else None

    def backward(received: Any, grads: list[Any]) -> tuple[list[Any]]:
        # Integers have no gradient.
        differentiable = [index for index, one in enumerate(grads[: len(shapes)]) if one.dtype != jax.dtypes.float0]
        found: list[Any] = [None] * len(shapes)
        passed = _backward(
            work, [shapes[index] for index in differentiable], [grads[index] for index in differentiable], received
        )
        for index, gradient in zip(differentiable, passed, strict=True):
            found[index] = gradient
        return (found,)

    collective = jax.custom_vjp(forward)
    collective.defvjp(forward_with_residuals, backward)
    return list(collective(inputs))


def _backward(work: Work, shapes: list[tuple[int, ...]], grads: list[Any], received: Any) -> list[Any]:
    again = replace(work, name=None, names=None, grouped=work.grouped or work.names is not None)
    if work.kind == Kind.ALLREDUCE:
        return run(again, grads)
    plain = replace(again, kind=Kind.ALLREDUCE, op=Average, scales=(1.0, 1.0), root=-1)
    if work.kind == Kind.BROADCAST:
        return [grad if rank() == work.root else jnp.zeros_like(grad) for grad in run(plain, grads)]
    if work.kind == Kind.ALLGATHER:
        return _own_rows(work, shapes, run(plain, grads))
    if work.kind == Kind.REDUCESCATTER:
        factor = work.scales[0] * work.scales[1] * (_members(work) if work.op == Sum else 1)
        return _everyones_rows(again, shapes, [grad * jnp.asarray(factor, grad.dtype) for grad in grads])
    rows = run(again, grads, received)[0]
    # Rows beyond the sum of the splits were not sent.
    left = shapes[0][0] - rows.shape[0]
    return [jnp.concatenate([rows, jnp.zeros((left, *rows.shape[1:]), rows.dtype)]) if left else rows]


def _members(work: Work) -> int:
    return len(runtime.world.groups.members(work.process_set)[1])


def _member_index(work: Work) -> int:
    return list(runtime.world.groups.members(work.process_set)[1]).index(rank())


def _own_rows(work: Work, shapes: list[tuple[int, ...]], grads: Sequence[Any]) -> list[Any]:
    """This rank's part of the gradients of gathered arrays. Outside compiled functions, ranks may have different
    numbers of rows.
    """
    own = np.array([[shape[0] for shape in shapes]])
    if traced(grads):
        before = own[0] * _member_index(work)
    else:
        before = arrays_ops.allgather(own, process_set=work.process_set)[: _member_index(work)].sum(0)
    return [grad[start : start + rows] for grad, start, rows in zip(grads, before, own[0], strict=True)]


def _everyones_rows(work: Work, shapes: list[tuple[int, ...]], grads: list[Any]) -> list[Any]:
    """The gradients of the rows of all ranks. XLA cannot gather unequal numbers of rows: these are added to zeros."""
    members, index = _members(work), _member_index(work)
    if all(shape[0] % members == 0 for shape in shapes) or not traced(grads):
        return run(replace(work, kind=Kind.ALLGATHER, op=Sum, scales=(1.0, 1.0)), grads)
    spread = []
    for shape, grad in zip(shapes, grads, strict=True):
        start = index * (shape[0] // members) + min(index, shape[0] % members)
        spread.append(jnp.zeros(shape, grad.dtype).at[start : start + grad.shape[0]].set(grad))
    return run(replace(work, kind=Kind.ALLREDUCE, op=Sum, scales=(1.0, 1.0)), spread)
