# The optimizer for op=Adasum: each rank steps alone, and Adasum combines the steps.
# Touches torch; the rooms bindings.private, engine, operations and world; the files ops, scaling and wrapping.
"""Adasum keeps once the part that two steps have in common, and adds the parts in which they differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..bindings.private.torch_names import runs_hooks_itself, step_with_scaler
from ..engine.interface import ReduceOp
from ..operations.pending import checked_compression
from ..operations.reductions import Adasum, Max
from ..world.groups import ProcessSet, global_process_set
from .ops import begin_allreduce
from .scaling import agree_on_infinity, prepare_scalers
from .wrapping import adopt, checked_passes, class_over, registered, state_of, super_of


class _DistributedAdasumOptimizer(torch.optim.Optimizer):
    """Methods of a DistributedOptimizer with op=Adasum; they come before those of the wrapped class.

    Other libraries derive from this class, change its methods, use it in `isinstance`, and copy its methods into their
    own classes.
    """

    param_groups: list[dict[str, Any]]
    process_set: ProcessSet
    backward_passes_per_step: int
    op: ReduceOp
    grad_scale: Any  # set by GradScaler while it steps
    found_inf: Any

    def __init__(self, params: Any, named_parameters: Any, compression: Any, backward_passes_per_step: int = 1) -> None:
        """Only for classes of other libraries: DistributedOptimizer() converts the wrapped optimizer instead."""
        super_of(self, _DistributedAdasumOptimizer).__init__(params)
        prepare_scalers()
        names = {param: name for name, param in named_parameters or ()}
        param_names = [names.get(param, f"noname.{index}") for index, param in enumerate(self._params())]
        self.prepare(
            param_names, checked_compression(compression), checked_passes(backward_passes_per_step), global_process_set
        )

    def prepare(self, names: list[str], compression: Any, passes: int, process_set: ProcessSet) -> None:
        """Used instead of a constructor: the wrapped optimizer's attributes exist already."""
        odd = [name for name, param in zip(names, self._params(), strict=True) if not param.is_floating_point()]
        if odd:
            raise ValueError(f"Adasum needs parameters of floating types; these have others: {', '.join(odd)}")
        self._reduction = f"adasum.{names[0] if names else ''}"
        self._compression = compression
        self.backward_passes_per_step = passes
        self.process_set = process_set
        self.op = Adasum

    @runs_hooks_itself  # the wrapped class's step runs the step hooks, so they must not run here too
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps on this rank, reduces the change that the step made, and applies the result instead."""
        # Frozen ones too: they have not changed, but another rank may have frozen other parameters.
        params = [param.detach() for param in self._params()]
        if self.process_set.included() is False or not params:
            return self._own_step(closure)
        if not self._unscaled():
            return None
        starts = [param.clone() for param in params]
        try:
            result = self._own_step(closure)
            self._reduce(params, starts)
        except BaseException:
            for param, start in zip(params, starts, strict=True):
                param.copy_(start)  # as if there had been no step
            raise
        return result

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _own_step(self, closure: Callable[[], Any] | None) -> Any:
        base = super_of(self, _DistributedAdasumOptimizer)
        return base.step() if closure is None else base.step(closure)

    def _reduce(self, params: list[torch.Tensor], starts: list[torch.Tensor]) -> None:
        packed = [
            self._compression.compress((param - start).contiguous())
            for param, start in zip(params, starts, strict=True)
        ]
        deltas = [delta for delta, _ in packed]
        begin_allreduce(
            deltas, self._reduction, Adasum, (1.0, 1.0), self.process_set, grouped=True, in_place=True
        ).result()
        for param, start, (delta, context) in zip(params, starts, packed, strict=True):
            param.copy_(start + self._compression.decompress(delta, context))

    def _unscaled(self) -> bool:
        """Undoes the scale of a GradScaler. False if some rank has infinite gradients: then all ranks skip the step."""
        found, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found is None:
            return True
        worst = found.detach().clone()
        if begin_allreduce([worst], None, Max, (1.0, 1.0), self.process_set, grouped=False, in_place=True).result() > 0:
            return False
        if scale is not None:
            for param in self._params():
                if param.grad is not None:
                    param.grad.div_(scale)
        self.grad_scale = self.found_inf = None  # a fused step would scale again
        return True

    def before_scaler(self) -> None:
        """GradScaler calls this before it reads the gradients: all ranks' scalers must see the same infinities."""
        if self.process_set.included() is not False:
            agree_on_infinity((param.grad for param in self._params()), self._reduction, self.process_set)

    def after_scaler(self) -> None:
        """Does nothing: no gradients are reduced."""

    def synchronize(self) -> None:
        """Does nothing: nothing is pending before step()."""

    def skip_synchronize(self) -> Any:
        """AssertionError: the steps must be reduced."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Like that of the other distributed optimizer."""
        self.backward_passes_per_step = checked_passes(passes)

    def __copy__(self) -> Any:
        return adopt(type(self), self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = state_of(self)
        process_set = state.pop("process_set")
        ranks = None if process_set is global_process_set else process_set.ranks
        return _restore, (type(self).__mro__[2], ranks, state)


step_with_scaler(_DistributedAdasumOptimizer)


def _restore(base: type, ranks: list[int] | None, state: dict[str, Any]) -> Any:
    prepare_scalers()
    optimizer: Any = object.__new__(class_over(_DistributedAdasumOptimizer, base))
    optimizer.process_set = registered(ranks)
    optimizer.__setstate__(state)
    return optimizer
