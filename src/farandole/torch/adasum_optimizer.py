# The optimizer for op=Adasum: each rank steps by itself, and the steps are added up by Adasum.
# Touches ops, wrapping and the NumPy layer below.
"""Adasum keeps of two steps what they agree on once, and adds up what they do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..engine import ReduceOp
from ..groups import ProcessSet, global_process_set
from ..reductions import Adasum
from .ops import begin_allreduce
from .wrapping import adopt, class_over, registered, state_of


class AdasumSteps:
    """The methods that a DistributedOptimizer with op=Adasum has before those of the wrapped class."""

    param_groups: list[dict[str, Any]]
    process_set: ProcessSet
    backward_passes_per_step: int
    op: ReduceOp

    def prepare(self, names: list[str], compression: Any, passes: int, process_set: ProcessSet) -> None:
        """Instead of a constructor: the wrapped optimizer's attributes are there already."""
        self._reduction = f"adasum.{names[0] if names else ''}"
        self._compression = compression
        self.backward_passes_per_step = passes
        self.process_set = process_set
        self.op = Adasum

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps here, reduces the difference that the step made, and takes that instead."""
        base: Any = super()
        params = [param.detach() for group in self.param_groups for param in group["params"] if param.requires_grad]
        starts = [param.clone() for param in params]
        result = base.step() if closure is None else base.step(closure)
        if self.process_set.included() is False or not params:
            return result
        packed = [
            self._compression.compress((param - start).contiguous())
            for param, start in zip(params, starts, strict=True)
        ]
        deltas = [delta for delta, _ in packed]
        begin_allreduce(deltas, None, self._reduction, Adasum, (1.0, 1.0), self.process_set, True, True).result()
        for param, start, (delta, context) in zip(params, starts, packed, strict=True):
            param.copy_(start + self._compression.decompress(delta, context))
        return result

    step.hooked = True  # type: ignore[attr-defined]  # the wrapped class's step runs the step hooks: once is enough

    def synchronize(self) -> None:
        """Nothing: there is nothing to wait for before step()."""

    def skip_synchronize(self) -> Any:
        """AssertionError: the steps must be reduced."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def set_backward_passes_per_step(self, passes: int) -> None:
        """As the other distributed optimizer's."""
        if passes <= 0:
            raise ValueError("backward_passes_per_step must be > 0")
        self.backward_passes_per_step = passes

    def __copy__(self) -> Any:
        return adopt(type(self), self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = state_of(self)
        process_set = state.pop("process_set")
        ranks = None if process_set is global_process_set else process_set.ranks
        return _restore, (type(self).__mro__[2], ranks, state)


def _restore(base: type, ranks: list[int] | None, state: dict[str, Any]) -> Any:
    optimizer: Any = object.__new__(class_over(AdasumSteps, base))
    optimizer.process_set = registered(ranks)
    optimizer.__setstate__(state)
    return optimizer
