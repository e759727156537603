# Adds up the gradients of several backward passes, so that they are reduced only once.
# Touches TensorFlow.
"""`LocalGradientAggregationHelper` is for optimizers that apply gradients in functions, graphs and eager mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import naming
from .framework import tf


class LocalGradientAggregationHelper:
    """Adds up the gradients of `backward_passes_per_step` passes. The last pass reduces and applies them."""

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Callable[[Sequence[Any], Sequence[Any]], list[Any]],
        sparse_as_dense: bool = False,
        average_aggregated_gradients: bool = False,
    ) -> None:
        if backward_passes_per_step < 1:
            raise ValueError(f"backward_passes_per_step={backward_passes_per_step}: expected at least 1")
        self.backward_passes_per_step = backward_passes_per_step
        self.average_aggregated_gradients = average_aggregated_gradients
        self._reduce = allreduce_func
        self._sums: list[Any] = []
        self._passes: Any = None
        self._last: Any = None  # whether the current pass is the last one

    def compute_gradients(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients to apply: the reduced sums in the last pass; before it, zeros that are not applied."""
        if self.backward_passes_per_step == 1:
            return self._reduce(grads, variables)
        present = [place for place, grad in enumerate(grads) if grad is not None]
        dense = [tf.convert_to_tensor(grads[place]) for place in present]  # a sum of slices has the rows of all passes
        self._prepare(dense)
        with tf.control_dependencies([self._passes.assign_add(1)]):
            added = [total.assign_add(grad) for total, grad in zip(self._sums, dense, strict=True)]
        with tf.control_dependencies([value for value in added if tf.is_tensor(value)]):
            self._last = tf.equal(self._passes.read_value(), self.backward_passes_per_step)
        owners = [variables[place] for place in present]
        reduced = tf.cond(self._last, lambda: self._reduced(owners), lambda: [tf.zeros_like(grad) for grad in dense])
        result = list(grads)
        for place, gradient in zip(present, reduced, strict=True):
            result[place] = gradient
        return result

    def apply_gradients(self, apply: Callable[[], Any]) -> Any:
        """In the last pass runs `apply()` and resets the sums; in other passes does nothing."""
        if self.backward_passes_per_step == 1:
            return apply()

        def done() -> Any:
            operation = apply()
            with tf.control_dependencies([operation] if isinstance(operation, tf.Operation) else []):
                resets = [total.assign(tf.zeros_like(total)) for total in self._sums] + [self._passes.assign(0)]
            return tf.group(*[one for one in resets if not tf.executing_eagerly()])

        if tf.executing_eagerly():
            return done() if bool(self._last) else None
        return tf.cond(self._last, lambda: flag(done()), lambda: tf.constant(False)).op

    def _reduced(self, variables: Sequence[Any]) -> list[Any]:
        sums = [total.read_value() for total in self._sums]
        if self.average_aggregated_gradients:
            sums = [total / self.backward_passes_per_step for total in sums]
        return self._reduce(sums, variables)

    def _prepare(self, dense: Sequence[Any]) -> None:
        if self._passes is not None:
            return

        self._passes = kept(np.int64(0))
        for grad in dense:
            self._sums.append(kept(np.zeros(grad.shape.as_list(), grad.dtype.as_numpy_dtype)))


def kept(value: Any) -> Any:
    """A variable that keeps its value between passes; in a graph, its sessions initialise it."""
    if tf.executing_eagerly() or tf.inside_function():
        with tf.init_scope():
            return tf.Variable(value, trainable=False)
    name = naming.in_graph("aggregation", "aggregation", None, True)
    return tf.compat.v1.get_variable(name, initializer=value, trainable=False, use_resource=True)


def flag(operation: Any) -> Any:
    """A value that exists after the operation has run, because branches must give values."""
    with tf.control_dependencies([operation]):
        return tf.constant(True)
