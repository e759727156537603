# DistributedOptimizer: a torch optimizer whose gradients are those of all ranks.
# Touches torch; the rooms bindings.private, engine, operations and world; other files of this room.
"""Wraps any optimizer. The result's class has the name of the wrapped class and derives from it."""

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

from ..bindings.private.torch_names import runs_hooks_itself
from ..engine.interface import ReduceOp
from ..operations.pending import checked_compression, chosen_op
from ..operations.reductions import Average
from ..world.groups import ProcessSet, global_process_set
from ..world.runtime import runtime
from .adasum_optimizer import _DistributedAdasumOptimizer
from .buckets import Gradients
from .compression import Compression
from .ops import allreduce_
from .scaling import prepare_scalers
from .sharded_optimizer import shard
from .slots import Terms
from .wrapping import adopt, checked_passes, class_over, registered, state_of, super_of

__all__ = ["DistributedOptimizer"]


class Shown:
    """An attribute of an optimizer that comes from its gradients. A derived class may assign another value to it."""

    def __init__(self, read: Callable[[Gradients], Any]) -> None:
        self.read = read

    def __get__(self, optimizer: Any, owner: type | None = None) -> Any:
        return self if optimizer is None else self.read(optimizer._gradients)


class _DistributedOptimizer(torch.optim.Optimizer):
    """The methods of a DistributedOptimizer, which come before those of the wrapped class.

    Other libraries derive from this class, change its methods, use it in `isinstance`, and copy its methods into their
    own classes.
    """

    _gradients: Gradients
    _should_synchronize: bool
    _synchronized: bool  # synchronize() was called since the last step() or zero_grad()
    _for_scaler: bool  # GradScaler caused that call, not the script
    param_groups: list[dict[str, Any]]  # of the wrapped class

    def __init__(
        self,
        params: Any,
        named_parameters: Any,
        compression: Any,
        backward_passes_per_step: int = 1,
        op: Any = Average,
        gradient_predivide_factor: float = 1.0,
        groups: Any = None,
        sparse_as_dense: bool = False,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        """Only for classes of other libraries: DistributedOptimizer() converts the wrapped optimizer instead."""
        super_of(self, _DistributedOptimizer).__init__(params)
        chosen, own_params = chosen_op(op, None), _params_of(self)
        _check_factor(gradient_predivide_factor, chosen)
        prepare_scalers()
        _check_set(process_set)
        passes = checked_passes(backward_passes_per_step)
        terms = Terms(
            checked_compression(compression), chosen, process_set, passes, gradient_predivide_factor, sparse_as_dense
        )
        _attach_gradients(
            self, Gradients(own_params, _names_of(self, named_parameters), _bundles_of(own_params, 0, groups), terms)
        )

    # --- what scripts call -------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Waits until all gradients are reduced; gradients that were not computed count as zeros."""
        try:
            self._gradients.synchronize()
        finally:
            self._synchronized, self._for_scaler = True, False

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside this context step() uses the gradients as they are; call synchronize() first."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    @runs_hooks_itself  # the wrapped class's step runs the step hooks, so they must not run here too
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronizes the gradients and calls the wrapped optimizer's step.

        With a closure, the gradients are reduced each time it is called.
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
        elif not self._synchronized:
            self._gradients.steps_alone()
        self._synchronized = False
        base = super_of(self, _DistributedOptimizer)
        return base.step() if closure is None else base.step(closure)

    def _reduced(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        @functools.wraps(closure)
        def run() -> Any:
            loss = closure()
            self.synchronize()
            if isinstance(self, torch.optim.LBFGS) and self._gradients.active:
                # LBFGS decides from the loss how often it calls this, so all ranks must have the same loss.
                name = f"loss.{next(iter(self._gradients.slots.values())).name}"
                loss = torch.as_tensor(loss).detach().clone()
                allreduce_(loss, name=name, op=Average, process_set=self._gradients.terms.process_set)
            return loss

        return run

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Like the wrapped optimizer's, with `set_to_none`; AssertionError while gradients are pending."""
        if self._gradients.pending:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        self._synchronized = False
        base = super_of(self, _DistributedOptimizer)
        base.zero_grad(*args, **kwargs)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From now on, gradients are reduced after this many backward passes."""
        self._gradients.set_passes(checked_passes(passes))

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Like the wrapped optimizer's; it waits for pending gradients first and discards them."""
        with contextlib.suppress(Exception):  # a failure belongs to the state that is being replaced
            self._gradients.drain()
        self._should_synchronize, self._synchronized = True, False
        base = super_of(self, _DistributedOptimizer)
        base.load_state_dict(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Like the wrapped optimizer's; the gradients of the new parameters are reduced too."""
        base = super_of(self, _DistributedOptimizer)
        base.add_param_group(param_group)
        if "_gradients" not in self.__dict__:
            return  # called by the wrapped class's constructor
        number = len(self.param_groups) - 1
        params = self.param_groups[number]["params"]
        self._gradients.add(params, [f"noname.{number}.{index}" for index in range(len(params))])

    @staticmethod
    def find_duplicates(names: Sequence[str]) -> set[str]:
        """Names that occur more than once."""
        return {name for name, times in Counter(names).items() if times > 1}

    # --- what other libraries read -----------------------------------------------------------------------------------

    @property
    def backward_passes_per_step(self) -> int:
        return self._gradients.passes

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self._gradients.passes = passes

    op = Shown(lambda gradients: gradients.terms.op)
    gradient_predivide_factor = Shown(lambda gradients: gradients.terms.predivide)
    sparse_as_dense = Shown(lambda gradients: gradients.terms.sparse_as_dense)
    process_set = Shown(lambda gradients: gradients.terms.process_set)
    _compression = Shown(lambda gradients: gradients.terms.compression)
    _parameter_names = Shown(lambda gradients: {slot.param: slot.user_name for slot in gradients.slots.values()})
    _handles = Shown(Gradients.handles)
    _allreduce_delay = Shown(lambda gradients: {slot.param: slot.delay for slot in gradients.slots.values()})
    _requires_update = Shown(lambda gradients: {param for param in gradients.slots if param.requires_grad})

    def before_scaler(self) -> None:
        """GradScaler calls this before it checks and changes the gradients: they must be reduced before that."""
        if self._should_synchronize and (not self._synchronized or self._gradients.pending):
            self.synchronize()
            self._for_scaler = True

    def after_scaler(self) -> None:
        """GradScaler calls this after it made or skipped a step. The next step synchronizes again."""
        self._synchronized = False

    # --- copies ------------------------------------------------------------------------------------------------------

    def __copy__(self) -> Any:
        """The copy shares the parameters and therefore everything about their gradients."""
        return adopt(type(self), self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        gradients = self._gradients
        indices = {param: index for index, param in enumerate(gradients.slots)}
        names = [slot.user_name for slot in gradients.slots.values()]
        bundles = [[indices[slot.param] for slot in bundle.slots] for bundle in gradients.groups]
        chosen = gradients.terms.process_set
        ranks = None if chosen is global_process_set else chosen.ranks
        terms = {**vars(gradients.terms), "passes": gradients.passes, "process_set": ranks}
        return _restore, (type(self).__mro__[2], names, bundles, terms, state_of(self))


def _restore(
    base: type, names: list[str], bundles: list[list[int]], terms: dict[str, Any], state: dict[str, Any]
) -> Any:
    """Makes a copy, or an object from a pickle: it makes the class again and uses the parameters of `state`."""
    prepare_scalers()
    optimizer: Any = object.__new__(class_over(_DistributedOptimizer, base))
    params = [param for group in state["param_groups"] for param in group["params"]]
    members = [[params[index] for index in indices] for indices in bundles]
    terms = {**terms, "process_set": registered(terms["process_set"])}
    _attach_gradients(optimizer, Gradients(params, names, members, Terms(**terms)))
    optimizer.__setstate__(state)
    return optimizer


# Horovod's optimizer calls these for each gradient. A class that overrides one wants another way of reducing.
OF_EACH_GRADIENT = (
    "_register_hooks", "_make_hook", "_allreduce_grad_async", "_grouped_allreduce_grad_async",
    "_sparse_allreduce_grad_async",
)  # fmt: skip


def _attach_gradients(optimizer: Any, gradients: Gradients) -> None:
    classes = [one for one in type(optimizer).__mro__ if issubclass(one, _DistributedOptimizer)]
    for name in OF_EACH_GRADIENT:
        if any(name in vars(one) for one in classes):  # a method of the wrapped class may have such a name
            raise NotImplementedError(
                f"{type(optimizer).__name__} has its own {name}(), which would not be called: gradients are reduced in "
                "buckets here. Write a compressor and give it as compression=, or override synchronize()"
            )
    optimizer._gradients = gradients
    optimizer._should_synchronize, optimizer._synchronized, optimizer._for_scaler = True, False, False


# --- the arguments ---------------------------------------------------------------------------------------------------


def _check_wrapped(optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}; expected a torch.optim.Optimizer")
    if isinstance(optimizer, (_DistributedOptimizer, _DistributedAdasumOptimizer)):
        raise ValueError("optimizer is a DistributedOptimizer already; wrap the optimizer once")


def _check_set(process_set: ProcessSet) -> None:
    """Ranks outside the process set may wrap their optimizers too; they train alone."""
    if not isinstance(process_set, ProcessSet) or process_set.included() is None:
        runtime.world.groups.members(process_set)  # raises the error that says what is wrong


def _check_factor(factor: Any, op: ReduceOp) -> None:
    if factor != 1.0 and op != ReduceOp.AVERAGE:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if not (isinstance(factor, (int, float)) and 0 < factor < math.inf):
        raise ValueError(f"gradient_predivide_factor={factor!r}: expected a number above 0")


def _params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _names_of(optimizer: torch.optim.Optimizer, named_parameters: Any) -> list[str]:
    """A name for each parameter; ValueError unless each parameter has its own name."""
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
    twice = _DistributedOptimizer.find_duplicates([name for name, _ in named])
    if twice:
        raise ValueError(
            "Parameter names in named_parameters must be unique. Found duplicates: " + ", ".join(sorted(twice))
        )
    names = {param: name for name, param in named}
    params = _params_of(optimizer)
    unnamed = [index for index, param in enumerate(params) if param not in names]
    if unnamed:
        shapes = ", ".join(f"number {index} of shape {tuple(params[index].shape)}" for index in unnamed)
        raise ValueError(f"named_parameters was specified, but one or more model parameters were not named: {shapes}")
    return [names[param] for param in params]


def _bundles_of(params: list[torch.Tensor], num_groups: int, groups: Any) -> list[list[torch.Tensor]]:
    """The groups of parameters whose gradients are reduced together; an empty list if the user wants none."""
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
        starts = [index * size + min(index, more) for index in range(count + 1)]
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
    """An optimizer like `optimizer`, with the same parameters and state, that steps with the gradients of all ranks.

    named_parameters: `model.named_parameters()`; the names appear in timelines and messages.
    compression: the form in which gradients are sent.
    backward_passes_per_step: the gradients of this many backward passes are added up before they are reduced.
    op: Average, Sum or another reduction. Adasum combines the steps of the ranks instead of their gradients.
    gradient_predivide_factor: the part of the division by the number of ranks that is done before the sum.
    groups: the number of groups of gradients, or lists of parameters; the gradients of a group are reduced together.
    sparse_as_dense: makes sparse gradients dense before they are sent.
    process_set: the ranks that train together.
    shard_optimizer_state: each rank keeps the state of its share of the parameters and steps only these (ZeRO-1). The
        results are the same; the memory for the state is divided by the number of ranks. Every rank must call
        state_dict().
    """
    chosen = chosen_op(op, None)
    _check_wrapped(optimizer)
    _check_factor(gradient_predivide_factor, chosen)
    passes = checked_passes(backward_passes_per_step)
    terms = Terms(
        checked_compression(compression), chosen, process_set, passes, gradient_predivide_factor, sparse_as_dense
    )
    prepare_scalers()
    params = _params_of(optimizer)
    names = _names_of(optimizer, named_parameters)
    bundles = _bundles_of(params, num_groups, groups)
    _check_set(process_set)
    if shard_optimizer_state and process_set.included():
        if bundles or gradient_predivide_factor != 1.0:
            raise ValueError(
                "shard_optimizer_state=True is not supported together with groups or gradient_predivide_factor"
            )
        return shard(_DistributedOptimizer, optimizer, names, terms)
    base: Any = type(optimizer)
    if chosen == ReduceOp.ADASUM and runtime.size > 1:
        distributed = adopt(class_over(_DistributedAdasumOptimizer, base), optimizer)
        distributed.prepare(names, compression, passes, process_set)
        return distributed
    distributed = adopt(class_over(_DistributedOptimizer, base), optimizer)
    _attach_gradients(distributed, Gradients(params, names, bundles, terms))
    return distributed
