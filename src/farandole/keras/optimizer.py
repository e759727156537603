# DistributedOptimizer for Keras 3 on its backends: `apply` uses the gradients of all ranks.
# Touches framework and, by the backend, farandole.tensorflow, farandole.torch or farandole.jax.
"""Wraps an optimizer. The class keeps the wrapped name, so that saved models load without this package."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ..bindings.private.tensorflow_names import check_sums, check_variables, trainable
from ..operations.pending import chosen_op
from ..operations.reductions import Adasum, Average
from ..world.groups import ProcessSet, global_process_set
from .compression import Compression
from .framework import require
from .gradients import reduction_on

Reduce = Callable[[Sequence[Any], Sequence[Any]], list[Any]]


class ReducedUpdates:
    """Methods of a DistributedOptimizer; they come before those of the wrapped class."""

    def register_local_var(self, var: Any) -> None:
        """The gradient of this variable is not reduced."""
        self._farandole.local.add(id(var))
        behind = getattr(var, "value", None)
        if behind is not None and not callable(behind):
            self._farandole.local.add(id(behind))

    @property
    def _farandole(self) -> Any:
        return self.__dict__["_farandole_reduction"]

    # The two hooks of Horovod's optimizers. Other code derives from the class or replaces them.

    def _allreduce(self, grads: Any, vars: Any) -> list[Any]:
        """The gradients of all ranks; local variables keep this rank's gradients."""
        return list(self._farandole.apart(list(grads), list(vars), self._allreduce_grads))

    def _allreduce_grads(self, grads: Any, vars: Any) -> list[Any]:
        """The gradients of all ranks for variables that are not local."""
        return list(self._farandole(list(grads), list(vars)))

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Like the wrapped optimizer's, with the gradients of all ranks."""
        base: Any = super()
        grads = list(grads)
        if base.__getattribute__("gradient_accumulation_steps"):
            if not hasattr(base, "_clip_gradients"):  # nothing would be reduced; the steps may have been set just now
                check_sums(_wrapped_class(type(self)))
        elif grads:
            variables = trainable_variables
            if variables is None:
                variables = trainable(base.__getattribute__)
            grads = self._allreduce(grads, list(variables))
        return base.apply(grads, trainable_variables)

    def _clip_gradients(self, grads: Any) -> Any:
        # With gradient accumulation, Keras has the sums of all passes here, before anything else uses them.
        base: Any = super()
        steps = base.__getattribute__("gradient_accumulation_steps")
        if steps:
            factor = self.__dict__["_farandole_factor"]
            summed = [grad if factor == 1 else grad * factor for grad in grads]
            grads = self._allreduce(summed, trainable(base.__getattribute__)[: len(summed)])
        return base._clip_gradients(grads)


def _wrapped_class(kind: type) -> type:
    """The class of Keras, below our class and the classes that other code has derived from ours."""
    order = kind.__mro__
    return order[order.index(ReducedUpdates) + 1]


@functools.cache
def _class_over(base: Any, methods: type) -> Any:
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (methods, base), names)


def with_methods(optimizer: Any, methods: type, reduction: Any) -> Any:
    """An object with all attributes of the optimizer; its class has the methods of `methods` before the optimizer's."""
    kind: Any = type(optimizer)
    twin: Any = object.__new__(_class_over(kind, methods))
    object.__setattr__(twin, "__dict__", optimizer.__dict__)  # Keras tracks assignments
    twin.__dict__["_farandole_reduction"] = reduction
    return twin


def wrapped(optimizer: Any, reduction: Any, passes: int, average: bool) -> Any:
    """An object of the class derived from the optimizer's class, with all attributes of the optimizer."""
    kind: Any = type(optimizer)
    if isinstance(optimizer, ReducedUpdates):
        raise ValueError("optimizer is a DistributedOptimizer already")
    check_variables(optimizer)
    if passes > 1 or optimizer.gradient_accumulation_steps:
        check_sums(kind)
    twin = with_methods(optimizer, ReducedUpdates, reduction)
    twin.__dict__["_farandole_factor"] = 1
    if passes > 1:
        if optimizer.gradient_accumulation_steps:
            raise ValueError("give gradient_accumulation_steps to the optimizer or backward_passes_per_step, not both")
        if optimizer.built:
            raise ValueError("backward_passes_per_step needs an optimizer that has not been used yet")
        twin.gradient_accumulation_steps = passes
        # Keras gives the mean of the passes. Horovod gives the sum, unless the mean is requested.
        twin.__dict__["_farandole_factor"] = 1 if average else passes
    return twin


def reduction_for(backend: str, **options: Any) -> Any:
    """The object that reduces gradients of a backend."""
    if backend == "tensorflow":
        from ..tensorflow.gradients import Reduction

        return Reduction(**options)
    if backend in ("torch", "jax"):
        return reduction_on(backend, **options)
    raise NotImplementedError(
        f"Keras runs on the backend {backend!r}; farandole.keras serves tensorflow, torch and jax "
        "(KERAS_BACKEND chooses)"
    )


def make(
    optimizer: Any, compression: Any, sparse_as_dense: bool, gradient_predivide_factor: float, op: Any,
    backward_passes_per_step: int, average_aggregated_gradients: bool, groups: Any, process_set: ProcessSet,
    scale_local_gradients: bool, local_layers: Any = None,
) -> Any:  # fmt: skip
    """A DistributedOptimizer for an optimizer of Keras 3."""
    if chosen_op(op, None) == Adasum:
        raise ValueError("op=Adasum is not supported with Keras optimizers")
    if backward_passes_per_step <= 0:
        raise ValueError(f"backward_passes_per_step={backward_passes_per_step}: expected at least 1")
    keras = require()
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(f"optimizer is a {type(optimizer).__name__}; expected an optimizer of Keras")
    options = {
        "compression": compression,
        "sparse_as_dense": sparse_as_dense,
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "groups": groups,
        "process_set": process_set,
        "scale_local_gradients": scale_local_gradients,
    }
    reduction = reduction_for(keras.backend.backend(), **options)
    result = wrapped(optimizer, reduction, backward_passes_per_step, average_aggregated_gradients)
    layers = [] if local_layers is None else local_layers if isinstance(local_layers, (list, tuple)) else [local_layers]
    for layer in layers:
        for variable in layer.trainable_variables:
            result.register_local_var(variable)
    return result


def DistributedOptimizer(
    optimizer: Any, name: str | None = None, device_dense: str = "", device_sparse: str = "",
    compression: Any = Compression.none, sparse_as_dense: bool = False, gradient_predivide_factor: float = 1.0,
    op: Any = Average, num_groups: int = 0, groups: Any = None, backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False, process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:  # fmt: skip
    """An optimizer that applies the average of all ranks' gradients. Do not use the given `optimizer` afterwards."""
    return make(
        optimizer, compression, sparse_as_dense, gradient_predivide_factor, op, backward_passes_per_step,
        average_aggregated_gradients, groups or num_groups or None, process_set, scale_local_gradients,
    )  # fmt: skip


def PartialDistributedOptimizer(
    optimizer: Any, name: str | None = None, device_dense: str = "", device_sparse: str = "",
    compression: Any = Compression.none, sparse_as_dense: bool = False, gradient_predivide_factor: float = 1.0,
    op: Any = Average, backward_passes_per_step: int = 1, average_aggregated_gradients: bool = False,
    groups: Any = None, process_set: ProcessSet = global_process_set, local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:  # fmt: skip
    """A DistributedOptimizer that does not reduce the gradients of `local_layers`."""
    return make(
        optimizer, compression, sparse_as_dense, gradient_predivide_factor, op, backward_passes_per_step,
        average_aggregated_gradients, groups, process_set, scale_local_gradients, local_layers,
    )  # fmt: skip
