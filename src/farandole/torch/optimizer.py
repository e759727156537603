# DistributedOptimizer: a torch optimizer whose gradients are those of all ranks.
# Touches torch, buckets, adasum_optimizer, scaling, wrapping, compression and the NumPy layer below.
"""Wraps any optimizer; the result is of a class of the same name that derives from the wrapped one's."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ..engine import ReduceOp
from ..groups import ProcessSet, global_process_set
from ..pending import checked_compression, chosen_op
from ..private.torch_names import runs_hooks_itself
from ..reductions import Average
from ..runtime import runtime
from .adasum_optimizer import AdasumSteps
from .buckets import Gradients
from .compression import Compression
from .ops import allreduce_
from .scaling import prepare_scalers
from .wrapping import adopt, checked_passes, class_over, registered, state_of

__all__ = ["DistributedOptimizer"]


class ReducedSteps:
    """The methods that a DistributedOptimizer has before those of the wrapped class."""

    _gradients: Gradients
    _should_synchronize: bool
    _synchronized: bool  # since the last step, and nothing has come since
    _for_scaler: bool  # because GradScaler asked, not the script
    param_groups: list[dict[str, Any]]  # the wrapped class's

    # --- what scripts call -------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Waits until all gradients are reduced; those that were not computed count as zeros."""
        try:
            self._gradients.synchronize()
        finally:
            self._synchronized, self._for_scaler = True, False

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, step() takes the gradients as they are: for use after synchronize()."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    @runs_hooks_itself  # the wrapped class's step runs the step hooks: once is enough
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronizes the gradients and lets the wrapped optimizer step.

        A closure's gradients are reduced each time it is called.
        """
        if self._should_synchronize:
            if closure is not None:
                closure = self._reduced(closure)
            if self._synchronized and not self._gradients.pending:
                if closure is None and not self._for_scaler:
                    warnings.warn(
                        "optimizer.step() called without optimizer.skip_synchronize() context after "
                        "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
                        "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code.",
                        stacklevel=2,
                    )
            elif closure is None or self._gradients.pending:
                self.synchronize()
        self._synchronized = False
        base: Any = super()
        return base.step() if closure is None else base.step(closure)

    def _reduced(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        @functools.wraps(closure)
        def run() -> Any:
            loss = closure()
            self.synchronize()
            if isinstance(self, torch.optim.LBFGS) and self._gradients.active:
                # It decides by the loss how often it calls this: all ranks must see the same.
                name = f"loss.{next(iter(self._gradients.slots.values())).name}"
                loss = torch.as_tensor(loss).detach().clone()
                allreduce_(loss, name=name, op=Average, process_set=self._gradients.process_set)
            return loss

        return run

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the wrapped optimizer's, `set_to_none` included; AssertionError while gradients are under way."""
        if self._gradients.pending:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        self._synchronized = False
        base: Any = super()
        base.zero_grad(*args, **kwargs)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From now on gradients are reduced after so many backward passes."""
        self._gradients.set_passes(checked_passes(passes))

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """As the wrapped optimizer's; gradients under way are waited for and forgotten."""
        with contextlib.suppress(Exception):  # what failed belongs to the state that is being replaced
            self._gradients.drain()
        self._should_synchronize, self._synchronized = True, False
        base: Any = super()
        base.load_state_dict(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the wrapped optimizer's; the new parameters' gradients are reduced too."""
        base: Any = super()
        base.add_param_group(param_group)
        number = len(self.param_groups) - 1
        params = self.param_groups[number]["params"]
        self._gradients.add(params, [f"noname.{number}.{index}" for index in range(len(params))])

    @staticmethod
    def find_duplicates(names: Sequence[str]) -> set[str]:
        """Names that occur more than once."""
        return {name for name, times in Counter(names).items() if times > 1}

    # --- what others look at -----------------------------------------------------------------------------------------

    @property
    def backward_passes_per_step(self) -> int:
        return self._gradients.passes

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self._gradients.passes = passes

    @property
    def process_set(self) -> ProcessSet:
        return self._gradients.process_set

    @property
    def _handles(self) -> dict[torch.Tensor, tuple[Any, Any]]:
        return self._gradients.handles()

    @property
    def _allreduce_delay(self) -> dict[torch.Tensor, int]:
        return {slot.param: slot.delay for slot in self._gradients.slots.values()}

    @property
    def _requires_update(self) -> set[torch.Tensor]:
        return {param for param in self._gradients.slots if param.requires_grad}

    def before_scaler(self) -> None:
        """Called by GradScaler before it looks at the gradients and changes them: they must be reduced by then."""
        if self._should_synchronize and (not self._synchronized or self._gradients.pending):
            self.synchronize()
            self._for_scaler = True

    def after_scaler(self) -> None:
        """Called by GradScaler when it has stepped, or has found infinities and not stepped: what comes now is new."""
        self._synchronized = False

    # --- copies ------------------------------------------------------------------------------------------------------

    def __copy__(self) -> Any:
        """Shares the parameters, and so everything about their gradients."""
        return adopt(type(self), self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        gradients = self._gradients
        places = {param: place for place, param in enumerate(gradients.slots)}
        options = {
            "names": [slot.given for slot in gradients.slots.values()],
            "compression": gradients.compression,
            "passes": gradients.passes,
            "op": gradients.op,
            "predivide": gradients.predivide,
            "bundles": [[places[slot.param] for slot in bundle.slots] for bundle in gradients.groups],
            "sparse_as_dense": gradients.sparse_as_dense,
            "ranks": None if gradients.process_set is global_process_set else gradients.process_set.ranks,
        }
        return _restore, (type(self).__mro__[2], options, state_of(self))


def _restore(base: type, options: dict[str, Any], state: dict[str, Any]) -> Any:
    """Makes a copy, or one from a pickle: of a class that is made anew, on whatever parameters came with it."""
    prepare_scalers()
    optimizer: Any = object.__new__(class_over(ReducedSteps, base))
    params = [param for group in state["param_groups"] for param in group["params"]]
    bundles = [[params[place] for place in places] for places in options.pop("bundles")]
    process_set = registered(options.pop("ranks"))
    _equip(optimizer, Gradients(params, **options, bundles=bundles, process_set=process_set))
    optimizer.__setstate__(state)
    return optimizer


def _equip(optimizer: Any, gradients: Gradients) -> None:
    optimizer._gradients = gradients
    optimizer._should_synchronize, optimizer._synchronized, optimizer._for_scaler = True, False, False


# --- what the user said ----------------------------------------------------------------------------------------------


def _check_wrapped(optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}; expected a torch.optim.Optimizer")
    if isinstance(optimizer, (ReducedSteps, AdasumSteps)):
        raise ValueError("optimizer is a DistributedOptimizer already; wrap the optimizer once")


def _check_set(process_set: ProcessSet) -> None:
    """Ranks outside of it may wrap their optimizers too: they train alone."""
    if not isinstance(process_set, ProcessSet) or process_set.included() is None:
        runtime.world.groups.members(process_set)  # says what is wrong with it


def _check_factor(factor: Any, op: ReduceOp) -> None:
    if factor != 1.0 and op != ReduceOp.AVERAGE:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if not (isinstance(factor, (int, float)) and 0 < factor < math.inf):
        raise ValueError(f"gradient_predivide_factor={factor!r}: expected a number above 0")


def _params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _names_of(optimizer: torch.optim.Optimizer, named_parameters: Any) -> list[str]:
    """A name for each parameter; ValueError unless all have one, and each its own."""
    if named_parameters is None:
        return [
            name
            for number, group in enumerate(optimizer.param_groups)
            for name in group.get("param_names")
            or [f"noname.{number}.{index}" for index in range(len(group["params"]))]
        ]
    named = list(named_parameters) if isinstance(named_parameters, Iterable) else [named_parameters]
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    twice = ReducedSteps.find_duplicates([name for name, _ in named])
    if twice:
        raise ValueError(
            "Parameter names in named_parameters must be unique. Found duplicates: " + ", ".join(sorted(twice))
        )
    names = {param: name for name, param in named}
    params = _params_of(optimizer)
    unnamed = [place for place, param in enumerate(params) if param not in names]
    if unnamed:
        shapes = ", ".join(f"number {place} of shape {tuple(params[place].shape)}" for place in unnamed)
        raise ValueError(f"named_parameters was specified, but one or more model parameters were not named: {shapes}")
    return [names[param] for param in params]


def _bundles_of(params: list[torch.Tensor], num_groups: int, groups: Any) -> list[list[torch.Tensor]]:
    """The groups of parameters whose gradients become ready together; none when the user wants none."""
    if num_groups != 0:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`", DeprecationWarning, stacklevel=3)
        if not isinstance(num_groups, int) or num_groups < 0:
            raise ValueError("num_groups should be a non-negative integer.")
        groups = num_groups if groups is None else groups
    if groups is None:
        return []
    if isinstance(groups, int) and groups > 0:
        count = min(groups, len(params))
        size, more = divmod(len(params), count)
        starts = [place * size + min(place, more) for place in range(count + 1)]
        return [params[start:end] for start, end in itertools.pairwise(starts)]
    if not isinstance(groups, (list, tuple)):
        raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
    seen: set[torch.Tensor] = set()
    for group in groups:
        if not isinstance(group, (list, tuple)) or any(not isinstance(param, torch.Tensor) for param in group):
            raise ValueError("groups must consist of torch.Tensor.")
        for param in group:
            if param in seen:
                raise ValueError("A parameter can only appear once in groups.")
            seen.add(param)
    return [list(group) for group in groups if group]


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Any = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    shard_optimizer_state: bool = False,
) -> Any:
    """An optimizer like `optimizer`, over the same parameters and state, that steps by the gradients of all ranks.

    named_parameters: `model.named_parameters()`; the names appear in timelines and messages.
    compression: what gradients are turned into for the journey.
    backward_passes_per_step: so many backward passes add up before the gradients are reduced.
    op: Average, Sum or another reduction; Adasum adds up the steps of the ranks instead of their gradients.
    gradient_predivide_factor: so much of the division by the number of ranks comes before the sum.
    groups: how many groups of gradients, or lists of parameters; those of a group are reduced together.
    sparse_as_dense: sparse gradients are made dense first.
    process_set: the ranks that train together.
    shard_optimizer_state: each rank keeps the state of, and steps, its share of the parameters (ZeRO-1). The results
        are the same, the memory for the state is divided by the number of ranks; every rank must call state_dict().
    """
    chosen = chosen_op(op, None)
    _check_wrapped(optimizer)
    _check_factor(gradient_predivide_factor, chosen)
    passes = checked_passes(backward_passes_per_step)
    checked_compression(compression)
    prepare_scalers()
    params = _params_of(optimizer)
    names = _names_of(optimizer, named_parameters)
    bundles = _bundles_of(params, num_groups, groups)
    _check_set(process_set)
    if shard_optimizer_state and process_set.included():
        if bundles or gradient_predivide_factor != 1.0:
            raise ValueError("shard_optimizer_state=True goes with neither groups nor gradient_predivide_factor")
        from .sharded_optimizer import shard  # which builds on this file

        return shard(optimizer, names, compression, passes, chosen, process_set)
    base: Any = type(optimizer)
    if chosen == ReduceOp.ADASUM and runtime.world.engine.size > 1:
        distributed = adopt(class_over(AdasumSteps, base), optimizer)
        distributed.prepare(names, compression, passes, process_set)
        return distributed
    distributed = adopt(class_over(ReducedSteps, base), optimizer)
    gradients = Gradients(
        params,
        names,
        compression=compression,
        passes=passes,
        op=chosen,
        predivide=gradient_predivide_factor,
        bundles=bundles,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    _equip(distributed, gradients)
    return distributed
