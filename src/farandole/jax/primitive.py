# A collective as a primitive of JAX: it can be traced and batched, and compiles to a call of XLA or a Python callback.
# Touches JAX, compiled, host and work.
"""`bind(work, arrays)` adds a collective to the program. Its effect is ordered: JAX keeps the order of the program.

Every rank runs the same program. XLA alone could run independent calls in any order, or at the same time. JAX passes a
token from each call with this effect to the next call, also from one program to the next. So the collectives of a
thread run one after the other, in the same order on all ranks, and wait only for ranks that are slower.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..bindings.work import Work, own_name
from ..engine.interface import Kind, ReduceOp
from ..operations.pending import names_of
from ..world.runtime import runtime
from . import compiled, host
from .framework import jax, jax_names


class InOrder(jax_names.Effect):  # type: ignore[misc]
    """The effect of every collective."""

    def __str__(self) -> str:
        return "Farandole"


EFFECT = InOrder()
jax_names.keep_in_order(InOrder)


@dataclass(frozen=True)
class Call:
    """The work in a traced function, with everything that its shapes and its code depend on."""

    work: Work
    group: int
    members: int
    index: int
    through_xla: bool

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the output, which XLA must know: the arrays of all ranks have the same number of rows."""
        kind = self.work.kind
        if kind in (Kind.ALLREDUCE, Kind.BROADCAST):
            return shape
        if kind == Kind.ALLGATHER:
            return (shape[0] * self.members, *shape[1:])
        if kind == Kind.REDUCESCATTER:
            return (shape[0] // self.members + (self.index < shape[0] % self.members), *shape[1:])
        if shape[0] % self.members:
            raise ValueError(
                f"alltoall without splits: {shape[0]} rows cannot be divided evenly among {self.members} ranks"
            )
        return shape


_primitive: Any = jax.extend.core.Primitive("farandole")
_primitive.multiple_results = True


def bind(work: Work, arrays: Sequence[Any]) -> list[Any]:
    """The outputs of the work on arrays, of which some are traced."""
    number, ranks = runtime.world.groups.members(work.process_set)
    through_xla = compiled.ready() and jax.default_backend() == "cpu"
    call = Call(work, number, len(ranks), list(ranks).index(runtime.world.engine.rank), through_xla)
    return list(_primitive.bind(*arrays, call=call))


@_primitive.def_impl  # type: ignore[untyped-decorator]
def _now(*arrays: Any, call: Call) -> list[Any]:
    return host.carry_out(call.work, arrays)


@_primitive.def_effectful_abstract_eval  # type: ignore[untyped-decorator]
def _shapes(*arrays: Any, call: Call) -> tuple[list[Any], set[Any]]:
    return [jax.core.ShapedArray(call.shape(one.shape), one.dtype) for one in arrays], {EFFECT}


def _batched(arrays: Sequence[Any], axes: Sequence[Any], *, call: Call) -> tuple[list[Any], list[Any]]:
    """vmap: every rank has the same batch, which is sent as a whole; the rows stay the first dimension."""
    if call.work.kind in (Kind.ALLREDUCE, Kind.BROADCAST):
        if call.work.op == ReduceOp.ADASUM:
            raise NotImplementedError("Adasum needs whole arrays, so it cannot be used under vmap")
        return _primitive.bind(*arrays, call=call), list(axes)
    moved = [one if axis is None else jax.numpy.moveaxis(one, axis, 1) for one, axis in zip(arrays, axes, strict=True)]
    return _primitive.bind(*moved, call=call), [None if axis is None else 1 for axis in axes]


jax_names.set_batching_rule(_primitive, _batched)


def full_name(work: Work) -> str:
    """The name in a traced function. A thread runs one call at a time, so all calls without a name can share one."""
    name = names_of("name", work.name)[0]
    plain = "jit" if name is None else work.name
    return own_name("jax", f"{'grouped_' if work.grouped else ''}{work.kind.name.lower()}.{plain}")


def _lowered(context: Any, *arrays: Any, call: Call) -> Any:
    token = jax_names.token_of(context, EFFECT)
    if call.through_xla and jax_names.runs_only_on_cpu(context):
        results, token = _xla_call(context, token, arrays, call)
    else:
        work = call.work if call.work.name is not None else dataclasses.replace(call.work, name="jit")

        def callback(*arrays: Any) -> tuple[Any, ...]:
            return tuple(host.arrays_of(work, arrays))

        results, token = jax_names.call_python(context, callback, token, list(arrays))
    jax_names.set_token(context, EFFECT, token)
    return results


def _xla_call(context: Any, token: Any, arrays: Sequence[Any], call: Call) -> tuple[Any, Any]:
    work = call.work
    in_place = work.kind in (Kind.ALLREDUCE, Kind.BROADCAST)
    aliases = {index + 1: index + 1 for index in range(len(arrays))} if in_place else None
    found = jax.ffi.build_ffi_lowering_function(compiled.TARGET, has_side_effect=True, operand_output_aliases=aliases)(
        jax_names.with_token(context),
        token,
        *arrays,
        kind=np.int32(work.kind),
        op=np.int32(work.op),
        group=np.int32(call.group),
        root=np.int32(work.root),
        members=np.int32(call.members),
        bundle=np.int32(1 if work.grouped else 2 if work.names is not None else 0),
        prescale=np.float64(work.scales[0]),
        postscale=np.float64(work.scales[1]),
        name=full_name(work),
    )
    token, *results = found.results
    return results, token


jax_names.set_lowering_rule(_primitive, _lowered)
