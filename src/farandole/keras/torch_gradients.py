# The gradients of a step where Keras runs on torch.
# Touches torch and farandole.torch.
"""`TorchReduction` does for torch what `farandole.tensorflow.gradients` does for TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..groups import ProcessSet, global_process_set
from ..pending import chosen_op
from ..reductions import Average
from ..torch import grouped_allreduce
from ..torch.compression import Compression, checked_compression


@dataclass
class TorchReduction:
    """How gradients are reduced: all of a step in one call. `local` holds variables whose gradients stay here."""

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
        sent = [result[place].detach().contiguous() for place in places]
        factor = self.gradient_predivide_factor
        reduced = grouped_allreduce(
            sent,
            name=f"gradients.{len(sent)}.{sum(tensor.numel() for tensor in sent)}",
            compression=self.compression,
            op=self.op,
            prescale_factor=1.0 / factor,
            postscale_factor=factor,
            process_set=self.process_set,
        )
        for place, gradient in zip(places, reduced, strict=True):
            result[place] = gradient
        return result
