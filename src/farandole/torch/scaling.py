# Support for torch's GradScaler with a DistributedOptimizer: gradients are reduced before it reads them.
# Touches two public methods of torch.amp.GradScaler and of its subclasses; operations, world and ops.
"""GradScaler does not tell an optimizer before it reads the gradients, so its own methods are changed.

`unscale_` and `step` call `before_scaler()` of an optimizer that has it. This applies to GradScaler and its subclasses,
which need not call `super()` (torch's ShardedGradScaler does not). `step` calls `after_scaler()` at its end. Other
scalers must call `optimizer.synchronize()` before they read the gradients.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..operations.reductions import Max
from ..world.groups import ProcessSet
from .ops import allreduce_


def prepare_scalers() -> None:
    """From now on GradScalers let distributed optimizers reduce gradients first. A second call changes nothing."""
    waiting: list[Any] = [torch.amp.GradScaler]
    while waiting:
        kind = waiting.pop()
        _prepare(kind)
        waiting += kind.__subclasses__()
    scaler: Any = torch.amp.GradScaler
    if "__init_subclass__" not in vars(scaler):
        scaler.__init_subclass__ = classmethod(_prepare_subclass)


def _prepare(kind: Any) -> None:
    """Changes the methods that this class itself defines; `step` of one class may call `unscale_` of another."""
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
    """If one rank's gradients are not finite, makes all ranks' non-finite, so that all GradScalers decide the
    same.
    """
    found = [grad for grad in grads if grad is not None]
    bad = torch.tensor([float(any(not _values(grad).isfinite().all() for grad in found))])
    if float(allreduce_(bad, name=f"infinity.{name}", op=Max, process_set=process_set)):
        for grad in found:
            grad.mul_(torch.inf)


def _values(grad: torch.Tensor) -> torch.Tensor:
    return grad.coalesce().values() if grad.is_sparse else grad
