# What happens when torch's GradScaler meets a DistributedOptimizer: gradients are reduced before it looks at them.
# Touches the two public methods of torch.amp.GradScaler and its subclasses that take an optimizer, ops and the NumPy
# layer below.
"""GradScaler tells an optimizer nothing before it reads gradients, so that its own methods have to do it.

`unscale_` and `step` call `before_scaler()` of an optimizer that has it: GradScaler's, and those of subclasses, which
need not call `super()` (torch's ShardedGradScaler does not). `step` calls `after_scaler()` when it is over. A scaler
that is no GradScaler calls `optimizer.synchronize()` before it looks at the gradients.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..groups import ProcessSet
from ..reductions import Max
from .ops import allreduce_


def prepare_scalers() -> None:
    """From now on GradScalers ask distributed optimizers for their reduced gradients; again is once."""
    waiting: list[Any] = [torch.amp.GradScaler]
    while waiting:
        kind = waiting.pop()
        _prepare(kind)
        waiting += kind.__subclasses__()
    scaler: Any = torch.amp.GradScaler
    if "__init_subclass__" not in vars(scaler):
        scaler.__init_subclass__ = classmethod(_prepare_subclass)


def _prepare(kind: Any) -> None:
    """The methods that this class itself has; `step` of one class may call `unscale_` of another."""
    for name in ("unscale_", "step"):
        method = vars(kind).get(name)
        if inspect.isfunction(method) and not hasattr(method, "asks_first"):
            setattr(kind, name, _asking_first(method, ends=name == "step"))


def _prepare_subclass(kind: Any, /, **options: Any) -> None:
    super(torch.amp.GradScaler, kind).__init_subclass__(**options)
    _prepare(kind)


def _asking_first(method: Callable[..., Any], ends: bool) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = getattr(optimizer, "before_scaler", None)
        if before is None or not self.is_enabled():
            return method(self, optimizer, *args, **kwargs)
        before()
        result = method(self, optimizer, *args, **kwargs)
        if ends:
            optimizer.after_scaler()
        return result

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
