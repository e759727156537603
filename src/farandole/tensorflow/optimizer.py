# DistributedOptimizer: the gradients of all ranks for Keras optimizers and those of tf.compat.v1.
# Touches TensorFlow, aggregation, gradients and, for Keras optimizers, farandole.tensorflow.keras.
"""Wraps an optimizer. Optimizers of Keras go to `farandole.tensorflow.keras`, which does the same for them."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from ..operations.pending import chosen_op
from ..operations.reductions import Adasum, Average
from ..world.groups import ProcessSet, global_process_set
from ..world.runtime import runtime
from .aggregation import LocalGradientAggregationHelper, persistent_variable, true_after
from .compression import Compression
from .framework import tf
from .gradients import Reduction, chosen_groups


class _DistributedOptimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """A tf.compat.v1 optimizer that contains another one and reduces gradients when they are computed."""

    def __init__(
        self, optimizer: Any, name: str | None = None, use_locking: bool = False, device_dense: str = "",
        device_sparse: str = "", compression: Any = Compression.none, sparse_as_dense: bool = False, op: Any = Average,
        gradient_predivide_factor: float = 1.0, backward_passes_per_step: int = 1,
        average_aggregated_gradients: bool = False, groups: Any = None,
        process_set: ProcessSet = global_process_set, scale_local_gradients: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(name=name or f"Distributed{type(optimizer).__name__}", use_locking=use_locking)
        self._optimizer = optimizer
        self._computes = False  # compute_gradients() was called, or a warning was given
        self._reduction = Reduction(
            compression, sparse_as_dense, op, gradient_predivide_factor, groups, process_set, scale_local_gradients
        )
        self._aggregation = LocalGradientAggregationHelper(
            backward_passes_per_step, self._reduced, average_aggregated_gradients=average_aggregated_gradients
        )

    def register_local_var(self, var: Any) -> None:
        """The gradient of this variable is not reduced."""
        self._reduction.local.add(id(var))

    def _allreduce_grads(self, grads: Any, vars: Any) -> list[Any]:
        """The reduced gradients of variables that are not local. Code for Horovod overrides this method."""
        return self._reduction(grads, vars)

    def _reduced(self, grads: Any, vars: Any) -> list[Any]:
        return self._reduction.apart(grads, vars, self._allreduce_grads)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Like the wrapped optimizer's, reduced over the ranks."""
        self._computes = True
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        if not pairs:
            return []
        gradients, variables = zip(*pairs, strict=True)
        return list(zip(self._aggregation.compute_gradients(gradients, variables), variables, strict=True))

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Like the wrapped optimizer's. With several passes per step, it applies at the last pass."""
        if not self._computes and runtime.size > 1:
            self._computes = True
            warnings.warn(
                "apply_gradients() of this optimizer uses gradients as they are; compute_gradients() and minimize() "
                "reduce them, and here neither was called. If nothing else reduces them, the ranks train alone: use "
                "hvd.DistributedGradientTape, and in fit() of Keras an optimizer of Keras",
                stacklevel=2,
            )
        return self._aggregation.apply_gradients(lambda: self._optimizer.apply_gradients(*args, **kwargs))

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """Like the wrapped optimizer's."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """Like the wrapped optimizer's."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """Like the wrapped optimizer's."""
        return self._optimizer.variables(*args, **kwargs)


class _DistributedAdasumOptimizer(_DistributedOptimizer):
    """The wrapped optimizer steps alone; Adasum combines the changes of the last steps."""

    def __init__(
        self, optimizer: Any, name: str | None = None, use_locking: bool = False, device_dense: str = "",
        device_sparse: str = "", compression: Any = Compression.none, backward_passes_per_step: int = 1, **more: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            optimizer, name, use_locking, compression=compression, op=Adasum,
            backward_passes_per_step=backward_passes_per_step, **more,
        )  # fmt: skip
        self._passes: Any = None  # since the last time that the ranks were equal
        self._starts: list[Any] = []  # the values of the variables at that time

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Like the wrapped optimizer's: not reduced, because the changes of its steps are reduced."""
        return self._optimizer.compute_gradients(*args, **kwargs)

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Steps alone. After `backward_passes_per_step` steps all ranks continue from the combined result."""
        pairs = [(gradient, variable) for gradient, variable in grads_and_vars if gradient is not None]
        variables = [variable for _, variable in pairs]
        passes = self._aggregation.backward_passes_per_step
        if self._passes is None:
            self._passes = persistent_variable(np.int64(0))
            for variable in variables:
                self._starts.append(
                    persistent_variable(np.zeros(variable.shape.as_list(), variable.dtype.as_numpy_dtype))
                )
        with tf.control_dependencies(_nodes([self._passes.assign_add(1)])):
            count = self._passes.read_value()
        saved = tf.cond(tf.equal(count, 1), lambda: _flagged(self._begin(variables)), lambda: tf.constant(False))
        with tf.control_dependencies(_nodes([saved])):
            stepped = self._optimizer.apply_gradients(pairs, *args, **kwargs)
        with tf.control_dependencies(_nodes([stepped])):
            combined = tf.cond(
                tf.equal(count, passes), lambda: _flagged(self._combine(variables)), lambda: tf.constant(False)
            )
        return None if tf.executing_eagerly() else tf.group(combined)

    def _begin(self, variables: list[Any]) -> list[Any]:
        return [start.assign(variable.read_value()) for start, variable in zip(self._starts, variables, strict=True)]

    def _combine(self, variables: list[Any]) -> list[Any]:
        starts = [start.read_value() for start in self._starts]
        changes = [variable.read_value() - start for variable, start in zip(variables, starts, strict=True)]
        together = self._reduction(changes, variables)
        moved = [
            variable.assign(start + change) for variable, start, change in zip(variables, starts, together, strict=True)
        ]
        return [*moved, self._passes.assign(0)]


def _nodes(done: list[Any]) -> list[Any]:
    """Operations that a graph can wait for; none in eager mode, where all have run."""
    return [] if tf.executing_eagerly() else [one for one in done if one is not None]


def _flagged(done: list[Any]) -> Any:
    return true_after(tf.group(*_nodes(done)))


def DistributedOptimizer(
    optimizer: Any, name: str | None = None, use_locking: bool = False, device_dense: str = "",
    device_sparse: str = "", compression: Any = Compression.none, sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1, op: Any = Average, gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False, num_groups: int = 0, groups: Any = None,
    process_set: ProcessSet = global_process_set, scale_local_gradients: bool = True,
) -> Any:  # fmt: skip
    """An optimizer that applies the average of all ranks' gradients; for Keras and tf.compat.v1 optimizers."""
    if backward_passes_per_step <= 0:
        raise ValueError(f"backward_passes_per_step={backward_passes_per_step}: expected at least 1")
    if op == Adasum and average_aggregated_gradients:
        raise ValueError("average_aggregated_gradients is not supported with op=Adasum")
    groups = chosen_groups(num_groups, groups)
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        if chosen_op(op, None) == Adasum:
            return _DistributedAdasumOptimizer(
                optimizer, name, use_locking, device_dense, device_sparse, compression, backward_passes_per_step,
                sparse_as_dense=sparse_as_dense, groups=groups, process_set=process_set,
                gradient_predivide_factor=gradient_predivide_factor,
            )  # fmt: skip
        return _DistributedOptimizer(
            optimizer, name, use_locking, device_dense, device_sparse, compression, sparse_as_dense, op,
            gradient_predivide_factor, backward_passes_per_step, average_aggregated_gradients, groups, process_set,
            scale_local_gradients,
        )  # fmt: skip
    if not hasattr(optimizer, "apply_gradients"):
        raise ValueError(f"optimizer is a {type(optimizer).__name__}; expected one of Keras or of tf.compat.v1.train")
    if op == Adasum:
        raise ValueError("op=Adasum is not supported with Keras optimizers")
    from .keras.optimizer import DistributedOptimizer as of_keras  # importing Keras takes long

    return of_keras(
        optimizer, name, device_dense, device_sparse, compression, sparse_as_dense, gradient_predivide_factor, op,
        backward_passes_per_step, average_aggregated_gradients, 0, groups, process_set, scale_local_gradients,
    )  # fmt: skip
