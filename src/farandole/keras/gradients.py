# The gradients of a step where Keras runs on torch or JAX.
# Touches the backend's own binding: farandole.torch or farandole.jax.
"""`Reduction` does for them what `farandole.tensorflow.gradients` does for TensorFlow."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..groups import ProcessSet, global_process_set
from ..pending import checked_compression, chosen_op
from ..reductions import Average
from .compression import Compression


@dataclass
class Reduction:
    """How gradients are reduced: all of a step in one call. `local` holds variables whose gradients stay here."""

    backend: str
    compression: Any = Compression.none
    sparse_as_dense: bool = False
    op: Any = Average
    gradient_predivide_factor: float = 1.0
    groups: Any = None
    process_set: ProcessSet = field(default_factory=lambda: global_process_set)
    scale_local_gradients: bool = True
    local: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.op = chosen_op(self.op, None)
        self._binding = importlib.import_module(f"farandole.{self.backend}")
        checked_compression(self.compression)
        if self.gradient_predivide_factor != 1.0 and self.op != Average:
            raise ValueError("gradient_predivide_factor only makes sense with op=Average")

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The reduced gradients, in the same order; None stays None."""
        if self.process_set.included() is False:
            return list(gradients)
        result = list(gradients)
        places = []
        for place, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is not None and id(variable) in self.local:
                count = self.process_set.size() if self.scale_local_gradients else 1
                result[place] = gradient / count
            elif gradient is not None:
                places.append(place)
        if not places:
            return result
        sent = [_plain(result[place]) for place in places]
        factor = self.gradient_predivide_factor
        reduced = self._binding.grouped_allreduce(
            sent,
            name=f"gradients.{len(sent)}.{sum(math.prod(tensor.shape) for tensor in sent)}",
            compression=self.compression,
            op=self.op,
            prescale_factor=1.0 / factor,
            postscale_factor=factor,
            process_set=self.process_set,
        )
        for place, gradient in zip(places, reduced, strict=True):
            result[place] = gradient
        return result


def reduction_on(backend: str, **options: Any) -> Reduction:
    """What reduces gradients on torch or JAX."""
    return (_opaque() if backend == "torch" else Reduction)(backend, **options)


@functools.cache
def _opaque() -> type[Reduction]:
    """A Reduction that torch's compiler calls as it is: with jit_compile=True Keras has it trace the whole step."""
    disable = importlib.import_module("torch").compiler.disable
    return type("TorchReduction", (Reduction,), {"__call__": disable(Reduction.__call__)})


def _plain(gradient: Any) -> Any:
    return gradient.detach().contiguous() if hasattr(gradient, "detach") else gradient
