# DistributedOptimizer for tf.keras: the one for Keras 3, or for tf_keras one that reduces in apply_gradients.
# Touches tf.keras, aggregation, gradients and farandole.keras.
"""Wraps an optimizer. The class keeps the wrapped name, so that saved models load without this package."""

from __future__ import annotations

from typing import Any

from ...bindings.private.tensorflow_names import make_slots
from ...keras.models import loaded
from ...keras.optimizer import make, with_methods
from ...operations.pending import chosen_op
from ...operations.reductions import Adasum, Average
from ...world.groups import ProcessSet, global_process_set
from ..aggregation import LocalGradientAggregationHelper
from ..compression import Compression
from ..framework import tf
from ..gradients import Reduction, chosen_groups


def legacy() -> bool:
    """Whether tf.keras is Keras 2."""
    return not str(getattr(tf.keras, "__version__", "2")).startswith("3")  # tf_keras has no version there


class ReducedGradients:
    """Methods of a DistributedOptimizer for tf_keras; they come before those of the wrapped class."""

    def register_local_var(self, var: Any) -> None:
        """The gradient of this variable is not reduced."""
        self.__dict__["_farandole_reduction"].local.add(id(var))

    def _allreduce(self, grads: Any, vars: Any) -> list[Any]:
        """The gradients of all ranks, in the last of several passes; local variables keep this rank's gradients."""
        aggregation: LocalGradientAggregationHelper = self.__dict__["_farandole_aggregation"]
        return aggregation.compute_gradients(list(grads), list(vars))

    def _allreduce_grads(self, grads: Any, vars: Any) -> list[Any]:
        """The gradients of all ranks for variables that are not local."""
        return list(self.__dict__["_farandole_reduction"](list(grads), list(vars)))

    def _reduced(self, grads: Any, vars: Any) -> list[Any]:
        return list(self.__dict__["_farandole_reduction"].apart(grads, vars, self._allreduce_grads))

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Like the wrapped optimizer's, with the gradients of all ranks."""
        base: Any = super()
        gradients, variables = zip(*list(grads_and_vars), strict=True)
        aggregation: LocalGradientAggregationHelper = self.__dict__["_farandole_aggregation"]
        reduced = self._allreduce(gradients, variables)
        # Slots are variables, which cannot be made inside the branch that applies.
        if aggregation.backward_passes_per_step > 1:
            with tf.init_scope():
                make_slots(self, list(variables))
        pairs = list(zip(reduced, variables, strict=True))
        return aggregation.apply_gradients(lambda: base.apply_gradients(pairs, *args, **kwargs))


def over_legacy(optimizer: Any, reduction: Reduction, passes: int, average: bool) -> Any:
    """A DistributedOptimizer for an optimizer of tf_keras, with all its attributes."""
    twin = with_methods(optimizer, ReducedGradients, reduction)
    twin.__dict__["_farandole_aggregation"] = LocalGradientAggregationHelper(
        passes, twin._reduced, average_aggregated_gradients=average
    )
    return twin


def DistributedOptimizer(
    optimizer: Any, name: str | None = None, device_dense: str = "", device_sparse: str = "",
    compression: Any = Compression.none, sparse_as_dense: bool = False, gradient_predivide_factor: float = 1.0,
    op: Any = Average, backward_passes_per_step: int = 1, average_aggregated_gradients: bool = False,
    num_groups: int = 0, groups: Any = None, process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:  # fmt: skip
    """An optimizer that applies the average of all ranks' gradients. Do not use the given `optimizer` afterwards."""
    groups = chosen_groups(num_groups, groups)
    if chosen_op(op, None) == Adasum:
        raise ValueError("op=Adasum is not supported with Keras optimizers")
    if legacy() and hasattr(optimizer, "apply_gradients"):
        reduction = Reduction(
            compression, sparse_as_dense, op, gradient_predivide_factor, groups, process_set, scale_local_gradients
        )
        return over_legacy(optimizer, reduction, backward_passes_per_step, average_aggregated_gradients)
    return make(
        optimizer, compression, sparse_as_dense, gradient_predivide_factor, op, backward_passes_per_step,
        average_aggregated_gradients, groups, process_set, scale_local_gradients,
    )  # fmt: skip


def load_model(
    filepath: Any, custom_optimizers: Any = None, custom_objects: Any = None, compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:  # fmt: skip
    """Like `farandole.keras.load_model`, by tf.keras."""

    def distributed(optimizer: Any) -> Any:
        return DistributedOptimizer(optimizer, compression=compression)

    return loaded(tf.keras, filepath, custom_optimizers, custom_objects, distributed)
