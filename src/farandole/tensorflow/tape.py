# DistributedGradientTape: a GradientTape whose gradients are those of all ranks.
# Touches TensorFlow and gradients.
"""Wraps a tape; the result is of a class of the same name that derives from the wrapped one's."""

from __future__ import annotations

from typing import Any

from ..groups import ProcessSet, global_process_set
from ..reductions import Average
from .compression import Compression
from .framework import tf
from .gradients import Reduction, chosen_groups


class _ReducedGradients:
    """The methods that a DistributedGradientTape has before those of the wrapped class."""

    _reduction: Reduction

    def register_local_source(self, source: Any) -> None:
        """The gradient of this variable stays on its rank."""
        self._reduction.local.add(id(source))

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        unconnected_gradients: Any = None,
    ) -> Any:
        """The gradients, reduced over the ranks. `use_generic_names` is there for scripts: names never matter here."""
        base: Any = super()
        more = {} if unconnected_gradients is None else {"unconnected_gradients": unconnected_gradients}
        found = base.gradient(target, sources, output_gradients, **more)
        return tf.nest.pack_sequence_as(sources, self._reduce(tf.nest.flatten(found), tf.nest.flatten(sources)))

    def _reduce(self, gradients: list[Any], sources: list[Any]) -> list[Any]:
        # An IndexedSlices is one gradient, though it is a structure.
        return self._reduction(gradients, sources)

    def get_local_and_global_gradients(self, grads: Any, sources: Any, use_generic_names: bool = False) -> Any:
        """The gradients of local sources with their sources, and the others with theirs."""
        local: tuple[list[Any], list[Any]] = ([], [])
        others: tuple[list[Any], list[Any]] = ([], [])
        for gradient, source in zip(grads, sources, strict=True):
            gradients, owners = local if id(source) in self._reduction.local else others
            gradients.append(gradient)
            owners.append(source)
        return (*local, *others)


def _wrap(gradtape: Any, reduction: Reduction) -> Any:
    kind = type(gradtape)
    wrapped: Any = object.__new__(type(kind.__name__, (_ReducedGradients, kind), {}))
    wrapped.__dict__ = gradtape.__dict__
    wrapped._reduction = reduction
    return wrapped


def DistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """A tape whose `gradient()` gives the average of all ranks' gradients."""
    return _wrap(
        gradtape,
        Reduction(
            compression,
            sparse_as_dense,
            op,
            gradient_predivide_factor,
            chosen_groups(num_groups, groups),
            process_set,
            scale_local_gradients,
        ),
    )


def PartialDistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """A DistributedGradientTape that leaves the gradients of `local_layers` on their rank."""
    tape = DistributedGradientTape(
        gradtape, device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor,
        num_groups, groups, process_set, scale_local_gradients,
    )  # fmt: skip
    for variable in local_variables(local_layers):
        tape.register_local_source(variable)
    return tape


def local_variables(local_layers: Any) -> list[Any]:
    """The trainable variables of a layer, or of several; Keras 3's own, and the tf.Variables behind them."""
    layers = [] if local_layers is None else local_layers if isinstance(local_layers, (list, tuple)) else [local_layers]
    found: list[Any] = []
    for layer in layers:
        if not hasattr(layer, "trainable_variables"):
            raise ValueError(f"local_layers: {layer!r} is no layer")
        for variable in layer.trainable_variables:
            found.append(variable)
            behind = getattr(variable, "value", None)
            if behind is not None and not callable(behind):
                found.append(behind)
    return found
