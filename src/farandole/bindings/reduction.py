# The options for reducing the gradients of a step, and the name of that reduction, for all frameworks.
# Touches the rooms operations and world; the file compression.
"""The classes that reduce gradients in the bindings of TensorFlow, Keras and JAX derive from `ReductionOptions`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..operations.pending import checked_compression, chosen_op
from ..operations.reductions import Average
from ..world.groups import ProcessSet, global_process_set
from .compression import NoneCompressor


@dataclass
class ReductionOptions:
    """Options for reducing gradients. `local` has variables whose gradients are not reduced."""

    compression: Any = NoneCompressor
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

    @property
    def scales(self) -> tuple[float, float]:
        """The factors before and after the sum; their product is 1, and only the range of the sum changes."""
        return 1.0 / self.gradient_predivide_factor, self.gradient_predivide_factor


def name_of_step(sizes: Iterable[int]) -> str:
    """The name of the reduction of a step with gradients of these numbers of elements.

    Models that train in turn need different names, which all ranks must find without communication.
    """
    found = list(sizes)
    return f"gradients.{len(found)}.{sum(found)}"
