# Reduces the gradients of a step if Keras runs on torch or JAX.
# Touches the backend's own binding: farandole.torch or farandole.jax.
"""`Reduction` does for these backends what `farandole.tensorflow.gradients` does for TensorFlow."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..bindings.reduction import ReductionOptions, name_of_step
from ..operations.reductions import Gradients, apart


@dataclass
class Reduction(ReductionOptions):
    """Reduces all gradients of a step in one call."""

    backend: str = "torch"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._binding = _binding(self.backend)

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The reduced gradients in the same order; None stays None."""
        if self.process_set.included() is False:
            return list(gradients)
        result = list(gradients)
        positions = []
        for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is not None and id(variable) in self.local:
                count = self.process_set.size() if self.scale_local_gradients else 1
                result[index] = gradient / count
            elif gradient is not None:
                positions.append(index)
        if not positions:
            return result
        sent = [_plain(result[index]) for index in positions]
        reduced = self._binding.grouped_allreduce(
            sent,
            name=name_of_step(math.prod(tensor.shape) for tensor in sent),
            compression=self.compression,
            op=self.op,
            prescale_factor=self.scales[0],
            postscale_factor=self.scales[1],
            process_set=self.process_set,
        )
        for index, gradient in zip(positions, reduced, strict=True):
            result[index] = gradient
        return result

    def apart(self, gradients: Sequence[Any], variables: Sequence[Any], reduce: Gradients) -> list[Any]:
        """Like a call, but gradients that are not local go through `reduce(gradients, variables)`."""
        return list(apart(gradients, variables, self.local, self, reduce))


def reduction_on(backend: str, **options: Any) -> Reduction:
    """The object that reduces gradients on torch or JAX."""
    return (_opaque() if backend == "torch" else Reduction)(backend=backend, **options)


@functools.cache
def _opaque() -> type[Reduction]:
    """A Reduction that torch's compiler does not trace. With jit_compile=True Keras lets it trace the whole step."""
    import torch

    disable: Any = torch.compiler.disable
    return type("TorchReduction", (Reduction,), {"__call__": disable(Reduction.__call__)})


def _binding(backend: str) -> Any:
    if backend == "torch":
        from .. import torch

        return torch
    from .. import jax

    return jax


def _plain(gradient: Any) -> Any:
    return gradient.detach().contiguous() if hasattr(gradient, "detach") else gradient
