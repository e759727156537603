# Averages the gradients of a model over all ranks while backward computes them, for any optimizer.
# Touches torch, its buckets, world.groups and operations.
"""`Reducer` has groups of parameters: those of one optimizer, or of one module of Fabric."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..operations.pending import checked_compression
from ..operations.reductions import Adasum, Average, Sum
from ..torch.buckets import Gradients
from ..torch.compression import Compression
from ..torch.slots import Terms
from ..world.groups import global_process_set
from .stack import COMPRESSIONS

NEVER = 1 << 60  # backward passes before gradients are sent


@dataclass(frozen=True)
class ReductionOptions:
    """How gradients are reduced: the options of `DistributedOptimizer`. `compression` may be a name."""

    compression: Any = Compression.none
    op: Any = Average
    gradient_predivide_factor: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.compression, str):
            if self.compression not in COMPRESSIONS:
                raise ValueError(f"compression={self.compression!r}: expected one of {', '.join(COMPRESSIONS)}")
            object.__setattr__(self, "compression", getattr(Compression, self.compression))
        checked_compression(self.compression)
        if self.op == Adasum or self.op not in (Average, Sum):
            raise ValueError(f"op={self.op!r}: a strategy reduces gradients by Average or Sum")
        if self.gradient_predivide_factor != 1.0 and self.op != Average:
            raise ValueError("gradient_predivide_factor is for op=Average")


class Reducer:
    """Averages gradients; `synchronize` is called after each backward pass."""

    def __init__(self, options: ReductionOptions) -> None:
        self.options = options
        self._groups: list[Gradients] = []
        self._no_sync_depth = 0

    def watch(self, named: Iterable[tuple[str, torch.Tensor]]) -> Gradients | None:
        """Adds a group of parameters whose gradients are reduced together, without those that are in another group."""
        known = {param for group in self._groups for param in group.slots}
        new = {param: name for name, param in named if param not in known}
        if not new:
            return None
        options = self.options
        terms = Terms(options.compression, options.op, global_process_set, predivide=options.gradient_predivide_factor)
        group = Gradients(list(new), list(new.values()), (), terms)
        self._groups.append(group)
        return group

    def pending(self, params: Iterable[torch.Tensor] = ()) -> bool:
        """Whether there are new gradients since the last `synchronize`, in all groups or in those of `params`."""
        chosen = self._of(params) if params else self._groups
        return any(group.pending for group in chosen)

    def _of(self, params: Iterable[torch.Tensor]) -> list[Gradients]:
        wanted = set(params)
        return [group for group in self._groups if not wanted.isdisjoint(group.slots)]

    def synchronize(self, all_groups: bool) -> None:
        """Waits until the gradients of all groups, or only of those with new gradients, are reduced."""
        if self._no_sync_depth:
            return
        for group in self._groups:
            if all_groups or group.pending:
                group.synchronize()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which each rank accumulates its gradients and sends nothing."""
        self._no_sync_depth += 1
        self._set_passes(NEVER)
        try:
            yield
        finally:
            self._no_sync_depth -= 1
            if not self._no_sync_depth:
                self._set_passes(1)

    def _set_passes(self, passes: int) -> None:
        for group in self._groups:
            group.set_passes(passes)

    def forget(self) -> None:
        """Removes all groups, because their world or the fit has ended."""
        for group in self._groups:
            with contextlib.suppress(Exception):
                group.drain()
        self._groups = []
