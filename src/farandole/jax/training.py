# Reduces the gradients of a step over all ranks: before an optimizer of optax, or after jax.grad.
# Touches JAX; the room bindings; the files compression and ops. Optax is not needed: its transformations are pairs.
"""A program needs only one of `DistributedOptimizer` and `value_and_grad`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from ..bindings.reduction import ReductionOptions, name_of_step
from ..operations.reductions import Average
from ..world.groups import ProcessSet, global_process_set
from .compression import Compression
from .framework import jax
from .ops import allreduce


class Reduction(ReductionOptions):
    """Reduces all gradients of a step in one call."""

    def __call__(self, gradients: Any) -> Any:
        """The reduced tree; None stays None. A rank outside the process set keeps its own gradients."""
        if self.process_set.included() is False or not (leaves := jax.tree.leaves(gradients)):
            return gradients
        return allreduce(
            gradients,
            name=name_of_step(leaf.size for leaf in leaves),
            compression=self.compression,
            op=self.op,
            prescale_factor=self.scales[0],
            postscale_factor=self.scales[1],
            process_set=self.process_set,
        )


def DistributedOptimizer(
    optimizer: Any,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """A transformation of optax that reduces the gradients over all ranks before `optimizer` gets them.

    With `backward_passes_per_step`, gradients of this many updates are added up (or averaged) and then reduced.
    """
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise ValueError(f"optimizer is a {type(optimizer).__name__}; expected a GradientTransformation of optax")
    if backward_passes_per_step <= 0:
        raise ValueError(f"backward_passes_per_step={backward_passes_per_step}: expected at least 1")
    reduction = Reduction(
        compression=compression, op=op, gradient_predivide_factor=gradient_predivide_factor, process_set=process_set
    )

    def update(updates: Any, state: Any, params: Any = None, **more: Any) -> Any:
        return optimizer.update(reduction(updates), state, params, **more)

    reduced = optimizer._replace(update=update)
    if backward_passes_per_step == 1:
        return reduced
    return _every(backward_passes_per_step, average_aggregated_gradients, reduced)


class Passes(NamedTuple):
    """The state of an optimizer that adds up gradients."""

    inner: Any
    sums: Any
    count: Any


def _every(passes: int, average: bool, optimizer: Any) -> Any:
    """Adds up the gradients of this many passes and then calls the optimizer; in other passes the updates are zeros."""

    def init(params: Any) -> Passes:
        zeros = jax.tree.map(jax.numpy.zeros_like, params)
        return Passes(optimizer.init(params), zeros, jax.numpy.zeros((), jax.numpy.int32))

    def update(updates: Any, state: Passes, params: Any = None, **more: Any) -> Any:
        sums = jax.tree.map(jax.numpy.add, state.sums, updates)

        def apply() -> tuple[Any, Passes]:
            whole = jax.tree.map(lambda one: one / passes, sums) if average else sums
            found, inner = optimizer.update(whole, state.inner, params, **more)
            return found, Passes(inner, jax.tree.map(jax.numpy.zeros_like, sums), jax.numpy.zeros_like(state.count))

        def keep() -> tuple[Any, Passes]:
            nothing = jax.tree.map(lambda one: jax.numpy.zeros(one.shape, one.dtype), jax.eval_shape(apply)[0])
            return nothing, Passes(state.inner, sums, state.count + 1)

        return jax.lax.cond(state.count + 1 == passes, apply, keep)

    return optimizer._replace(init=init, update=update)


def value_and_grad(
    fun: Callable[..., Any],
    argnums: Any = 0,
    has_aux: bool = False,
    *,
    compression: Any = Compression.none,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    **more: Any,
) -> Callable[..., Any]:
    """Like `jax.value_and_grad`, with the gradients of all ranks; the value is this rank's."""
    reduction = Reduction(
        compression=compression, op=op, gradient_predivide_factor=gradient_predivide_factor, process_set=process_set
    )
    alone = jax.value_and_grad(fun, argnums, has_aux, **more)

    @functools.wraps(fun)
    def together(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        value, gradients = alone(*args, **kwargs)
        return value, reduction(gradients)

    return together


def grad(fun: Callable[..., Any], argnums: Any = 0, has_aux: bool = False, **more: Any) -> Callable[..., Any]:
    """Like `jax.grad`, with the gradients of all ranks; other arguments as in `value_and_grad`."""
    both = value_and_grad(fun, argnums, has_aux, **more)

    @functools.wraps(fun)
    def gradients(*args: Any, **kwargs: Any) -> Any:
        value, found = both(*args, **kwargs)
        return (found, value[1]) if has_aux else found

    return gradients
