# Optimizers that first average gradients: DistributedOptimizer for modules, DistributedTrainer for Gluon.
# Touches MXNet, compression and ops.
"""Gradients are summed at the beginning of the update, which also divides by the number of ranks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from ..bindings.compat import split_list
from ..bindings.private.mxnet_names import begin_trainer, params_of
from ..operations.pending import checked_compression
from ..operations.reductions import Sum
from ..world.groups import ProcessSet, global_process_set
from ..world.runtime import runtime
from .compression import Compression
from .framework import mx
from .ops import grouped_allreduce_, sum_each


class Averaging:
    """How the gradients of a step are summed. The update divides by the number of ranks."""

    def __init__(self, predivide: float, num_groups: int, process_set: ProcessSet) -> None:
        if not predivide > 0:
            raise ValueError(f"gradient_predivide_factor={predivide!r}: expected a number above 0")
        if num_groups < 0:
            raise ValueError(f"num_groups={num_groups}: expected 0, for no groups, or their number")
        _, ranks = runtime.world.groups.members(process_set)
        self.prescale = 1.0 / predivide
        self.rescale = predivide / len(ranks)  # for the update
        self.num_groups = num_groups
        self.process_set = process_set
        self.alone = len(ranks) == 1 and predivide == 1.0

    def sum(self, named: Sequence[tuple[str, Any]]) -> None:
        """Sums in place."""
        if self.alone:
            return
        if self.num_groups == 0:
            sum_each(named, self.prescale, self.process_set)
            return
        common: dict[str, Any] = {"op": Sum, "prescale_factor": self.prescale, "process_set": self.process_set}
        for part in split_list(list(named), self.num_groups):
            if part:
                name = f"{part[0][0]}:{part[-1][0]}"
                grouped_allreduce_([tensor for _, tensor in part], name=name, **common)


class DistributedOptimizer(mx.optimizer.Optimizer):  # type: ignore[misc]
    """An optimizer for `Module` and for manual updates, whose gradients are first averaged over all ranks.

    All attributes are read from and written to the given optimizer.
    """

    def __init__(
        self,
        optimizer: Any,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        if not isinstance(optimizer, mx.optimizer.Optimizer):
            raise TypeError(f"optimizer is a {type(optimizer).__name__}; expected one of mxnet.optimizer")
        averaging = Averaging(gradient_predivide_factor, num_groups, process_set)
        self.__dict__.update(_optimizer=optimizer, _averaging=averaging)
        optimizer.rescale_grad *= averaging.rescale

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_optimizer" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._optimizer, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {"_optimizer": self._optimizer, "_averaging": self._averaging}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def _average(self, index: Any, grad: Any) -> None:
        several = isinstance(index, (list, tuple))
        pairs = zip(index, grad, strict=True) if several else [(index, grad)]
        self._averaging.sum([(str(index), tensor) for index, tensor in pairs])

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        self._average(index, grad)
        self._optimizer.update(index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        self._average(index, grad)
        self._optimizer.update_multi_precision(index, weight, grad, state)

    def create_state(self, index: Any, weight: Any) -> Any:
        return self._optimizer.create_state(index, weight)

    def create_state_multi_precision(self, index: Any, weight: Any) -> Any:
        return self._optimizer.create_state_multi_precision(index, weight)

    def set_learning_rate(self, lr: float) -> None:
        self._optimizer.set_learning_rate(lr)

    def set_lr_mult(self, args_lr_mult: Any) -> None:
        self._optimizer.set_lr_mult(args_lr_mult)

    def set_wd_mult(self, args_wd_mult: Any) -> None:
        self._optimizer.set_wd_mult(args_wd_mult)


class DistributedTrainer(mx.gluon.Trainer):  # type: ignore[misc]
    """Gluon's Trainer, whose `step` averages the gradients over all ranks before it updates the parameters.

    `prefix` comes before the names of gradients, so that several trainers have different names.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: Any = None,
        compression: Any = Compression.none,
        gradient_predivide_factor: float = 1.0,
        prefix: str | None = None,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        if isinstance(optimizer, DistributedOptimizer):
            warnings.warn(
                "DistributedTrainer averages gradients itself: it uses the wrapped optimizer without its "
                "DistributedOptimizer",
                stacklevel=2,
            )
            inner, averaging = optimizer._optimizer, optimizer._averaging
            inner.rescale_grad /= averaging.rescale
            optimizer = inner
        self._compression = checked_compression(compression)
        self._averaging = Averaging(gradient_predivide_factor, num_groups, process_set)
        self._prefix = prefix or ""
        if isinstance(params, list):  # names contain the index in the list, which must be the same on all ranks
            params = sorted(params, key=lambda param: str(getattr(param, "name", "")))
        super().__init__(params, optimizer, optimizer_params=optimizer_params, kvstore=None)
        begin_trainer(self, self._averaging.rescale)

    def _allreduce_grads(self) -> None:
        grads = []
        for index, param in enumerate(params_of(self)):
            if param.grad_req == "null":
                continue
            own = param.list_grad()
            if len(own) > 1:
                raise ValueError(f"{param.name} lies on {len(own)} devices; start one process for each of them")
            grads.append((f"{self._prefix}{index}", own[0]))
        travelling = [(name, *self._compression.compress(grad)) for name, grad in grads]
        self._averaging.sum([(name, tensor) for name, tensor, _ in travelling])
        for (_, grad), (_, tensor, context) in zip(grads, travelling, strict=True):
            reduced = self._compression.decompress(tensor, context)
            if reduced is not grad:
                grad[:] = reduced
