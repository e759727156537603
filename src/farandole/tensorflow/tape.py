# DistributedGradientTape: a GradientTape that gives the reduced gradients of all ranks.
# Touches TensorFlow and gradients.
"""Wraps a tape. The result's class has the name of the wrapped class and derives from it."""

from __future__ import annotations

from typing import Any

from ..operations.reductions import Average
from ..world.groups import ProcessSet, global_process_set
from .compression import Compression
from .framework import tf
from .gradients import Reduction, chosen_groups


class _ReducedGradients:
    """Methods of a DistributedGradientTape; they come before those of the wrapped class."""

    _reduction: Reduction

    def register_local_source(self, source: Any) -> None:
        """The gradient of this variable is not reduced."""
        self._reduction.local.add(id(source))

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        unconnected_gradients: Any = None,
    ) -> Any:
        """The gradients, reduced over the ranks. `use_generic_names` is accepted for compatibility: names have no
        effect.
        """
        base: Any = super()
        more = {} if unconnected_gradients is None else {"unconnected_gradients": unconnected_gradients}
        found = base.gradient(target, sources, output_gradients, **more)
        return tf.nest.pack_sequence_as(sources, self._reduce(tf.nest.flatten(found), tf.nest.flatten(sources)))

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """The gradients of `gradient()` as pairs (source, gradient): first those of local sources, then all others."""
        flat_sources = tf.nest.flatten(sources)
        base: Any = super()
        pairs = list(
            zip(
                flat_sources,
                self._reduce(base.gradient(target, flat_sources, output_gradients), flat_sources),
                strict=True,
            )
        )
        local = self._reduction.local
        return [pair for pair in pairs if id(pair[0]) in local], [pair for pair in pairs if id(pair[0]) not in local]

    @property
    def process_set(self) -> ProcessSet:
        return self._reduction.process_set

    @property
    def scale_local_gradients(self) -> bool:
        return self._reduction.scale_local_gradients

    def _reduce(self, gradients: list[Any], sources: list[Any]) -> list[Any]:
        # An IndexedSlices is one gradient, although it is a structure.
        return self._reduction.apart(gradients, sources, self._allreduce_grads)

    def _allreduce_grads(self, grads: Any, vars: Any, use_generic_names: bool = False) -> list[Any]:
        """The reduced gradients of sources that are not local. Code for Horovod overrides this method."""
        return self._reduction(grads, vars)


class _DistributedGradientTape(_ReducedGradients, tf.GradientTape):  # type: ignore[misc]
    """The class for `isinstance` and for subclasses. `tape` is the tape to wrap, or None for a new one."""

    def __init__(
        self, tape: Any, device_dense: str = "", device_sparse: str = "", compression: Any = Compression.none,
        sparse_as_dense: bool = False, op: Any = Average, gradient_predivide_factor: float = 1.0, groups: Any = None,
        persistent: bool = False, watch_accessed_variables: bool = True,
        process_set: ProcessSet = global_process_set, scale_local_gradients: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(persistent=persistent, watch_accessed_variables=watch_accessed_variables)
        if tape is not None:
            self.__dict__.update(tape.__dict__)
        self._reduction = Reduction(
            compression, sparse_as_dense, op, gradient_predivide_factor, groups, process_set, scale_local_gradients
        )


def _wrap(gradtape: Any, reduction: Reduction) -> Any:
    kind = type(gradtape)
    bases = (_DistributedGradientTape,) if kind is tf.GradientTape else (_DistributedGradientTape, kind)
    wrapped: Any = object.__new__(type(kind.__name__, bases, {}))
    wrapped.__dict__ = gradtape.__dict__
    wrapped._reduction = reduction
    return wrapped


def DistributedGradientTape(
    gradtape: Any, device_dense: str = "", device_sparse: str = "", compression: Any = Compression.none,
    sparse_as_dense: bool = False, op: Any = Average, gradient_predivide_factor: float = 1.0, num_groups: int = 0,
    groups: Any = None, process_set: ProcessSet = global_process_set, scale_local_gradients: bool = True,
) -> Any:  # fmt: skip
    """A tape whose `gradient()` gives the average of all ranks' gradients."""
    groups = chosen_groups(num_groups, groups)
    reduction = Reduction(
        compression, sparse_as_dense, op, gradient_predivide_factor, groups, process_set, scale_local_gradients
    )
    return _wrap(gradtape, reduction)


def PartialDistributedGradientTape(
    gradtape: Any, device_dense: str = "", device_sparse: str = "", compression: Any = Compression.none,
    sparse_as_dense: bool = False, op: Any = Average, gradient_predivide_factor: float = 1.0, num_groups: int = 0,
    groups: Any = None, process_set: ProcessSet = global_process_set, local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:  # fmt: skip
    """A DistributedGradientTape that does not reduce the gradients of `local_layers`."""
    tape = DistributedGradientTape(
        gradtape, device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor,
        num_groups, groups, process_set, scale_local_gradients,
    )  # fmt: skip
    for variable in local_variables(local_layers):
        tape.register_local_source(variable)
    return tape


def local_variables(local_layers: Any) -> list[Any]:
    """The trainable variables of one or several layers: variables of Keras 3 and the tf.Variables that they contain."""
    layers = [] if local_layers is None else local_layers if isinstance(local_layers, (list, tuple)) else [local_layers]
    found: list[Any] = []
    for layer in layers:
        if not hasattr(layer, "trainable_variables"):
            raise ValueError(f"local_layers: {layer!r} is not a layer")
        for variable in layer.trainable_variables:
            found.append(variable)
            behind = getattr(variable, "value", None)
            if behind is not None and not callable(behind):
                found.append(behind)
    return found
