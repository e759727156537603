# What happens when torch's GradScaler meets a DistributedOptimizer: gradients are reduced before it looks at them.
# Touches the two public methods of torch.amp.GradScaler that take an optimizer, ops and the NumPy layer below.
"""GradScaler tells an optimizer nothing before it reads gradients, so that its own methods have to do it.

`unscale_` and `step` call `before_scaler()` of an optimizer that has it. Subclasses that call `super()` are served as
well; others call `optimizer.synchronize()` before they look at the gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..autoload import allowed
from ..groups import ProcessSet
from ..reductions import Max
from .ops import allreduce_


def prepare_scalers() -> None:
    """From now on GradScaler asks distributed optimizers for their reduced gradients; again is once."""
    if not allowed():
        return
    for name in ("unscale_", "step"):
        method = getattr(torch.amp.GradScaler, name)
        if not hasattr(method, "asks_first"):
            setattr(torch.amp.GradScaler, name, _asking_first(method))


def _asking_first(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = getattr(optimizer, "before_scaler", None)
        if before is not None and self.is_enabled():
            before()
        return method(self, optimizer, *args, **kwargs)

    run.asks_first = True  # type: ignore[attr-defined]
    return run


def agree_on_infinity(grads: Iterable[torch.Tensor | None], name: str, process_set: ProcessSet) -> None:
    """Where one rank's gradients are not finite nobody's are: every GradScaler must come to the same conclusion."""
    found = [grad for grad in grads if grad is not None]
    bad = torch.tensor([float(any(not _values(grad).isfinite().all() for grad in found))])
    if float(allreduce_(bad, name=f"infinity.{name}", op=Max, process_set=process_set)):
        for grad in found:
            grad.mul_(torch.inf)


def _values(grad: torch.Tensor) -> torch.Tensor:
    return grad.coalesce().values() if grad.is_sparse else grad
