# DistributedOptimizer for Keras 3, on its backends: the gradients of all ranks in `apply`.
# Touches framework and, by the backend, farandole.tensorflow, farandole.torch or farandole.jax.
"""Wraps an optimizer; the result is of a class of the same name, so that saved models load without this package."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from ..groups import ProcessSet, global_process_set
from ..pending import chosen_op
from ..private.tensorflow_names import check_sums, look_at_variables, trainable
from ..reductions import Adasum, Average
from .compression import Compression
from .framework import require
from .gradients import reduction_on

Reduce = Callable[[Sequence[Any], Sequence[Any]], list[Any]]


class ReducedUpdates:
    """The methods that a DistributedOptimizer has before those of the wrapped class."""

    def register_local_var(self, var: Any) -> None:
        """The gradient of this variable stays on its rank."""
        self._farandole.local.add(id(var))
        behind = getattr(var, "value", None)
        if behind is not None and not callable(behind):
            self._farandole.local.add(id(behind))

    @property
    def _farandole(self) -> Any:
        return self.__dict__["_farandole_reduction"]

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """As the wrapped optimizer's, with the gradients of all ranks."""
        base: Any = super()
        grads = list(grads)
        if base.__getattribute__("gradient_accumulation_steps"):
            if not hasattr(base, "_clip_gradients"):  # nobody would reduce anything; it may have been set just now
                check_sums(type(self).__mro__[2])
        elif grads:
            variables = trainable_variables
            if variables is None:
                variables = trainable(base.__getattribute__)
            grads = self._farandole(grads, list(variables))
        return base.apply(grads, trainable_variables)

    def _clip_gradients(self, grads: Any) -> Any:
        # With gradient accumulation this is where Keras has the sums of all passes, and nothing else has seen them.
        base: Any = super()
        steps = base.__getattribute__("gradient_accumulation_steps")
        if steps:
            factor = self.__dict__["_farandole_factor"]
            summed = [grad if factor == 1 else grad * factor for grad in grads]
            grads = self._farandole(summed, trainable(base.__getattribute__)[: len(summed)])
        return base._clip_gradients(grads)


@functools.cache
def _class_over(base: Any) -> Any:
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (ReducedUpdates, base), names)


def wrapped(optimizer: Any, reduction: Any, passes: int, average: bool) -> Any:
    """An object of the class over the optimizer's own, with everything that the optimizer has."""
    kind: Any = type(optimizer)
    if isinstance(optimizer, ReducedUpdates):
        raise ValueError("optimizer is a DistributedOptimizer already")
    look_at_variables(optimizer)
    if passes > 1 or optimizer.gradient_accumulation_steps:
        check_sums(kind)
    twin: Any = object.__new__(_class_over(kind))
    object.__setattr__(twin, "__dict__", optimizer.__dict__)  # Keras watches assignments
    twin.__dict__["_farandole_reduction"] = reduction
    twin.__dict__["_farandole_factor"] = 1
    if passes > 1:
        if optimizer.gradient_accumulation_steps:
            raise ValueError("give gradient_accumulation_steps to the optimizer or backward_passes_per_step, not both")
        if optimizer.built:
            raise ValueError("backward_passes_per_step needs an optimizer that has not been used yet")
        twin.gradient_accumulation_steps = passes
        # Keras gives the mean of the passes; Horovod the sum, unless it is asked for the mean.
        twin.__dict__["_farandole_factor"] = 1 if average else passes
    return twin


def reduction_for(backend: str, **options: Any) -> Any:
    """What reduces gradients of a backend."""
    if backend == "tensorflow":
        return importlib.import_module("farandole.tensorflow.gradients").Reduction(**options)
    if backend in ("torch", "jax"):
        return reduction_on(backend, **options)
    raise NotImplementedError(
        f"Keras runs on the backend {backend!r}; farandole.keras serves tensorflow, torch and jax "
        "(KERAS_BACKEND chooses)"
    )


def make(
    optimizer: Any,
    compression: Any,
    sparse_as_dense: bool,
    gradient_predivide_factor: float,
    op: Any,
    backward_passes_per_step: int,
    average_aggregated_gradients: bool,
    groups: Any,
    process_set: ProcessSet,
    scale_local_gradients: bool,
    local_layers: Any = None,
) -> Any:
    """A DistributedOptimizer over an optimizer of Keras 3."""
    if chosen_op(op, None) == Adasum:
        raise ValueError("op=Adasum does not go with Keras optimizers")
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
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = Average,
    num_groups: int = 0,
    groups: Any = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """An optimizer that applies the average of all ranks' gradients. The first, `optimizer`, is used up by it."""
    return make(
        optimizer,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        backward_passes_per_step,
        average_aggregated_gradients,
        groups or num_groups or None,
        process_set,
        scale_local_gradients,
    )


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """A DistributedOptimizer that leaves the gradients of `local_layers` on their rank."""
    return make(
        optimizer,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        backward_passes_per_step,
        average_aggregated_gradients,
        groups,
        process_set,
        scale_local_gradients,
        local_layers,
    )
