# DistributedOptimizer: the gradients of all ranks for Keras optimizers and those of tf.compat.v1.
# Touches TensorFlow, aggregation, gradients and, for Keras optimizers, farandole.tensorflow.keras.
"""Wraps an optimizer; Keras optimizers go to `farandole.tensorflow.keras`, which does the same for them."""

from __future__ import annotations

import importlib
from typing import Any

from ..groups import ProcessSet, global_process_set
from ..reductions import Adasum, Average
from .aggregation import LocalGradientAggregationHelper
from .compression import Compression
from .framework import tf
from .gradients import Reduction, chosen_groups


class _DistributedOptimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """A tf.compat.v1 optimizer around another one; gradients are reduced where they are computed."""

    def __init__(self, optimizer: Any, name: str, use_locking: bool, reduction: Reduction, passes: int, average: bool):
        super().__init__(name=name, use_locking=use_locking)
        self._optimizer = optimizer
        self._reduction = reduction
        self._aggregation = LocalGradientAggregationHelper(passes, reduction, average_aggregated_gradients=average)

    def register_local_var(self, var: Any) -> None:
        """The gradient of this variable stays on its rank."""
        self._reduction.local.add(id(var))

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """As the wrapped optimizer's, reduced over the ranks."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        if not pairs:
            return []
        gradients, variables = zip(*pairs, strict=True)
        return list(zip(self._aggregation.compute_gradients(gradients, variables), variables, strict=True))

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """As the wrapped optimizer's; with several passes per step, at the last of them."""
        return self._aggregation.apply_gradients(lambda: self._optimizer.apply_gradients(*args, **kwargs))

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """As the wrapped optimizer's."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """As the wrapped optimizer's."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """As the wrapped optimizer's."""
        return self._optimizer.variables(*args, **kwargs)


class _AdasumOptimizer(_DistributedOptimizer):
    """Lets the wrapped optimizer step alone, and combines what the steps changed by Adasum."""

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """As the wrapped optimizer's: not reduced, since what its steps change is."""
        return self._optimizer.compute_gradients(*args, **kwargs)

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Steps alone from where all ranks stand, and goes on from where they come to together."""
        pairs = [(gradient, variable) for gradient, variable in grads_and_vars if gradient is not None]
        variables = [variable for _, variable in pairs]
        before = [tf.identity(variable.read_value()) for variable in variables]
        with tf.control_dependencies(before):
            stepped = self._optimizer.apply_gradients(pairs, *args, **kwargs)
        with tf.control_dependencies([] if tf.executing_eagerly() or stepped is None else [stepped]):
            changes = [variable.read_value() - old for variable, old in zip(variables, before, strict=True)]
        together = self._reduction(changes, variables)
        return tf.group(
            *[
                done
                for done in [
                    variable.assign(old + change)
                    for variable, old, change in zip(variables, before, together, strict=True)
                ]
                if not tf.executing_eagerly()
            ]
        )


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """An optimizer that applies the average of all ranks' gradients; for Keras and tf.compat.v1 optimizers."""
    if backward_passes_per_step <= 0:
        raise ValueError(f"backward_passes_per_step={backward_passes_per_step}: expected at least 1")
    if op == Adasum and average_aggregated_gradients:
        raise ValueError("average_aggregated_gradients does not go with op=Adasum")
    groups = chosen_groups(num_groups, groups)
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        reduction = Reduction(
            compression, sparse_as_dense, op, gradient_predivide_factor, groups, process_set, scale_local_gradients
        )
        kind = _AdasumOptimizer if reduction.op == Adasum else _DistributedOptimizer
        if reduction.op == Adasum and backward_passes_per_step > 1:
            raise ValueError("op=Adasum with a tf.compat.v1 optimizer reduces after each pass: leave out "
                             "backward_passes_per_step")  # fmt: skip
        own = name or f"Distributed{type(optimizer).__name__}"
        return kind(optimizer, own, use_locking, reduction, backward_passes_per_step, average_aggregated_gradients)
    if not hasattr(optimizer, "apply_gradients"):
        raise ValueError(f"optimizer is a {type(optimizer).__name__}; expected one of Keras or of tf.compat.v1.train")
    if op == Adasum:
        raise ValueError("op=Adasum does not go with Keras optimizers")
    # By name: the room of Keras stands above this one.
    keras = importlib.import_module("farandole.tensorflow.keras")
    return keras.DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        backward_passes_per_step,
        average_aggregated_gradients,
        0,
        groups,
        process_set,
        scale_local_gradients,
    )
