# Adds up the gradients of several backward passes, so that they are reduced only once.
# Touches TensorFlow.
"""`LocalGradientAggregationHelper` works in eager mode, in `tf.function` and in graphs of TensorFlow 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import naming
from .framework import tf


class LocalGradientAggregationHelper:
    """Adds up the gradients of `backward_passes_per_step` passes. In the last one it reduces and applies the sums."""

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
        self._is_last_pass: Any = None

    def compute_gradients(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Returns the reduced sums in the last pass, and zeros in the passes before it. The zeros are not applied."""
        if self.backward_passes_per_step == 1:
            return self._reduce(grads, variables)
        indices = [index for index, grad in enumerate(grads) if grad is not None]
        # A sum of IndexedSlices would have the rows of all passes, so the gradients are made dense first.
        dense_grads = [tf.convert_to_tensor(grads[index]) for index in indices]
        self._make_variables(dense_grads)
        with tf.control_dependencies([self._passes.assign_add(1)]):
            added = [total.assign_add(grad) for total, grad in zip(self._sums, dense_grads, strict=True)]
        with tf.control_dependencies([value for value in added if tf.is_tensor(value)]):
            self._is_last_pass = tf.equal(self._passes.read_value(), self.backward_passes_per_step)
        used_variables = [variables[index] for index in indices]
        reduced = tf.cond(
            self._is_last_pass,
            lambda: self._reduced_sums(used_variables),
            lambda: [tf.zeros_like(grad) for grad in dense_grads],
        )
        result = list(grads)
        for index, gradient in zip(indices, reduced, strict=True):
            result[index] = gradient
        return result

    def apply_gradients(self, apply: Callable[[], Any]) -> Any:
        """In the last pass calls `apply()` and sets the sums to zero. In other passes it does nothing."""
        if self.backward_passes_per_step == 1:
            return apply()

        def apply_and_reset() -> Any:
            operation = apply()
            with tf.control_dependencies([operation] if isinstance(operation, tf.Operation) else []):
                resets = [total.assign(tf.zeros_like(total)) for total in self._sums] + [self._passes.assign(0)]
            return tf.group(*[reset for reset in resets if not tf.executing_eagerly()])

        if tf.executing_eagerly():
            return apply_and_reset() if bool(self._is_last_pass) else None
        return tf.cond(self._is_last_pass, lambda: true_after(apply_and_reset()), lambda: tf.constant(False)).op

    def _reduced_sums(self, variables: Sequence[Any]) -> list[Any]:
        sums = [total.read_value() for total in self._sums]
        if self.average_aggregated_gradients:
            sums = [total / self.backward_passes_per_step for total in sums]
        return self._reduce(sums, variables)

    def _make_variables(self, dense_grads: Sequence[Any]) -> None:
        if self._passes is not None:
            return

        self._passes = persistent_variable(np.int64(0))
        for grad in dense_grads:
            self._sums.append(persistent_variable(np.zeros(grad.shape.as_list(), grad.dtype.as_numpy_dtype)))


def persistent_variable(value: Any) -> Any:
    """A variable that keeps its value between passes. In a graph, a session must initialise it."""
    if tf.executing_eagerly() or tf.inside_function():
        with tf.init_scope():
            return tf.Variable(value, trainable=False)
    name = naming.in_graph("aggregation", "aggregation", None, ignore_name_scope=True)
    return tf.compat.v1.get_variable(name, initializer=value, trainable=False, use_resource=True)


def true_after(operation: Any) -> Any:
    """Returns True after the operation has run. Both branches of `tf.cond` must return a value."""
    with tf.control_dependencies([operation]):
        return tf.constant(True)
