# Averages the gradients of a model over all ranks while backward computes them, for any optimizer.
# Touches torch/buckets and runtime.
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

NEVER = 1 << 60  # so many backward passes before a gradient is sent


@dataclass(frozen=True)
class ElasticOptions:
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

    def __init__(self, terms: ElasticOptions) -> None:
        self._terms = terms
        self._groups: list[Gradients] = []
        self._blocked = 0

    def watch(self, named: Iterable[tuple[str, torch.Tensor]]) -> Gradients | None:
        """Adds a group of parameters whose gradients are reduced together, without those that are in another group."""
        known = {param for group in self._groups for param in group.slots}
        new = {param: name for name, param in named if param not in known}
        if not new:
            return None
        given = self._terms
        terms = Terms(given.compression, given.op, global_process_set, predivide=given.gradient_predivide_factor)
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

    def synchronize(self, every: bool) -> None:
        """Waits until gradients are reduced: those of every group, or only of groups with new gradients."""
        if self._blocked:
            return
        for group in self._groups:
            if every or group.pending:
                group.synchronize()

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """A context in which each rank accumulates its gradients and sends nothing."""
        self._blocked += 1
        self._let_wait(NEVER)
        try:
            yield
        finally:
            self._blocked -= 1
            if not self._blocked:
                self._let_wait(1)

    def _let_wait(self, passes: int) -> None:
        for group in self._groups:
            group.set_passes(passes)

    def forget(self) -> None:
        """Removes all groups: their world or run has ended."""
        for group in self._groups:
            with contextlib.suppress(Exception):
                group.drain()
        self._groups = []
