# DistributedOptimizer(shard_optimizer_state=True): the wrapped optimizer steps this rank's share of the parameters.
# Touches torch, sharding and scaling; its methods come before those of optimizer.py, which it gets as an argument.
"""`optimizer.param_groups` has shares; `state_dict()` gives the whole state in the form of the plain optimizer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..bindings.private.torch_names import runs_hooks_itself
from ..engine.interface import ReduceOp
from .scaling import agree_on_infinity
from .sharding import Bucket, Shares, check_elementwise
from .slots import Terms, without_graph
from .wrapping import adopt, class_over


class ShardedSteps:
    """Methods of a sharded DistributedOptimizer; they come before those of every DistributedOptimizer."""

    _gradients: Shares
    _should_synchronize: bool
    _synchronized: bool  # the gradients are synchronized since the last step
    _for_scaler: bool  # because GradScaler asked, not the script
    param_groups: list[dict[str, Any]]  # of the wrapped class
    state: Any  # of the wrapped class, for shares
    _param_names: list[Any]  # of each group, if the wrapped optimizer had names
    _agreed: bool  # the ranks agreed whether there are infinities, since the last reduction

    def synchronize(self) -> None:
        """Like that of other distributed optimizers. Does nothing after a GradScaler has read the gradients and may
        have unscaled them.
        """
        if self._agreed and self._synchronized and not self._gradients.pending:
            return
        self._agreed = False
        base: Any = super()
        base.synchronize()

    @runs_hooks_itself  # the wrapped class's step runs the step hooks, so they must not run here too
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronizes the gradients, steps this rank's share, and copies the new parameters to all ranks."""
        self._gradients.load()
        base: Any = super()
        result = base.step(closure)
        self._gradients.publish()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the model's parameters; AssertionError while gradients are pending."""
        base: Any = super()
        base.zero_grad(set_to_none=True)  # clears the gradients of the shares
        for param in self._whole():
            if param.grad is not None:
                param.grad = None if set_to_none else param.grad.detach().zero_()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clips the averaged gradients by the norm of all of them together, which it returns.

        Use it instead of `synchronize()` and `torch.nn.utils.clip_grad_norm_`, which see only the gradients of one
        rank.
        """
        shares = self._gradients
        if not self._synchronized or shares.pending:
            self.synchronize()
            self._for_scaler = True  # so that step() does not reduce again
        grads = [bucket.shard.grad for bucket in shares.buckets if bucket.shard.grad is not None]
        parts = [torch.linalg.vector_norm(grad, norm_type, dtype=torch.float64).cpu() for grad in grads]
        if norm_type == float("inf"):
            total = shares.total(torch.stack(parts).max(), "norm", ReduceOp.MAX)
        else:
            total = shares.total(sum(part**norm_type for part in parts), "norm") ** (1.0 / norm_type)
        factor = min(1.0, max_norm / (float(total) + 1e-6))
        for grad in grads:
            grad.mul_(factor)
        return total

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as the wrapped optimizer has it without sharding. Every rank must call it."""
        base: Any = super()
        packed: dict[str, Any] = base.state_dict()
        index_of = {param: number for number, param in enumerate(self._whole())}
        state: dict[int, dict[str, Any]] = {number: {} for number in index_of.values()}
        for key in sorted({key for bucket in self._gradients.buckets for key in self.state[bucket.shard]}):
            self._gather_state(key, index_of, state)
        groups = []
        for number, group in enumerate(packed["param_groups"]):
            params = [index_of[param] for param in self._gradients.groups[number]]
            names = self._param_names[number]
            groups.append({**group, "params": params, **({} if names is None else {"param_names": names})})
        return {**packed, "state": {number: items for number, items in state.items() if items}, "param_groups": groups}

    def _gather_state(self, key: str, index_of: dict[torch.Tensor, int], state: dict[int, dict[str, Any]]) -> None:
        shares = self._gradients
        values = [self.state[bucket.shard].get(key) for bucket in shares.buckets]
        divided = [
            is_divided(value, bucket.shard.shape, key) for value, bucket in zip(values, shares.buckets, strict=True)
        ]
        if all(divided):
            for bucket, row in shares.gathered(f"state.{key}", values):
                for param, part in zip(bucket.params, bucket.parts(row), strict=True):
                    state[index_of[param]][key] = part.clone()
            return
        for bucket, value, is_part in zip(shares.buckets, values, divided, strict=True):
            if is_part:
                raise RuntimeError(f"the optimizer has the state {key} for some of its parameters only")
            for param in bucket.params:
                state[index_of[param]][key] = value.clone() if isinstance(value, torch.Tensor) else value

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a whole state, from a job with any number of ranks or from an optimizer without sharding."""
        shares = self._gradients
        with contextlib.suppress(Exception):  # a failure belongs to the state that is being replaced
            shares.drain()
        groups = state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [len(params) for params in shares.groups]:
            raise ValueError("the loaded state has other parameter groups than this optimizer")
        numbers = {
            param: number
            for params, group in zip(shares.groups, groups, strict=True)
            for param, number in zip(params, group["params"], strict=True)
        }
        shares.cut()
        states: list[dict[str, Any]] = []
        for bucket in shares.buckets:
            found = [state_dict["state"].get(numbers[param], {}) for param in bucket.params]
            states.append(_share_of(found, bucket) if any(found) else {})
        self.load_shares(states, groups, state_dict)

    def options(self) -> list[dict[str, Any]]:
        """The options of the parameter groups, such as learning rates, without the parameters."""
        return [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]

    def load_shares(
        self, states: Sequence[dict[str, Any]], groups: Sequence[dict[str, Any]], more: dict[str, Any] | None = None
    ) -> None:
        """Loads the state of this rank's share of each bucket, in the order of the buckets; `groups` are options, as
        above.
        """
        shares = self._gradients
        self.state.clear()
        state: dict[int, Any] = {}
        packed: list[dict[str, Any]] = []
        for number, group in enumerate(groups):
            self.param_groups[number]["params"] = shares.shards(number)
            first = sum(len(each["params"]) for each in packed)
            own_states = [items for items, bucket in zip(states, shares.buckets, strict=True) if bucket.group == number]
            state.update({first + at: items for at, items in enumerate(own_states) if items})
            rest = {key: value for key, value in group.items() if key != "param_names"}
            packed.append({**rest, "params": list(range(first, first + len(own_states)))})
        base: Any = super()
        base.load_state_dict({**(more or {}), "state": state, "param_groups": packed})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Like the wrapped optimizer's; the new parameters are divided too."""
        params = param_group["params"]
        whole = [params] if isinstance(params, torch.Tensor) else list(params)
        if any(param is other for param in whole for other in self._whole()):
            raise ValueError("some parameters appear in more than one parameter group")
        optimizer: Any = self  # a class made at run time is both
        torch.optim.Optimizer.add_param_group(optimizer, {**param_group, "params": whole})
        number = len(self.param_groups) - 1
        self._param_names.append(self.param_groups[number].pop("param_names", None))
        self._gradients.add(whole, [f"noname.{number}.{index}" for index in range(len(whole))])
        self.param_groups[number]["params"] = self._gradients.shards(number)

    def _whole(self) -> list[torch.Tensor]:
        """The model's parameters."""
        return [param for params in self._gradients.groups for param in params]

    def before_scaler(self) -> None:
        """Like that of other distributed optimizers. A rank sees only its share, so the ranks also exchange infinities.

        Runs once after each reduction, also if the script called `synchronize()` itself.
        """
        base: Any = super()
        base.before_scaler()
        if not self._agreed:
            shares = self._gradients
            grads = [bucket.shard.grad for bucket in shares.buckets]
            agree_on_infinity(grads, shares.buckets[0].name, shares.terms.process_set)
            self._agreed = True

    def __copy__(self) -> Any:
        raise TypeError("an optimizer with shard_optimizer_state=True cannot be copied; use its state_dict()")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("an optimizer with shard_optimizer_state=True cannot be pickled; use its state_dict()")


def is_divided(value: Any, shape: Sequence[int], key: str) -> bool:
    """Whether an item of a share's state has one value for each element."""
    return isinstance(value, torch.Tensor) and tuple(value.shape) == tuple(shape) and key != "step"


@without_graph
def _share_of(found: Sequence[dict[str, Any]], bucket: Bucket) -> dict[str, Any]:
    """This rank's share of the state of a bucket's parameters; parameters that were never stepped have zeros."""
    share: dict[str, Any] = {}
    at, full = next((at, items) for at, items in enumerate(found) if items)
    for key, value in full.items():
        divided = isinstance(value, torch.Tensor) and value.shape == bucket.params[at].shape
        if divided and key != "step":
            whole = [
                items.get(key, torch.zeros((), dtype=value.dtype)).expand(param.shape)
                for items, param in zip(found, bucket.params, strict=True)
            ]
            share[key] = torch.zeros(bucket.share, dtype=value.dtype)
            bucket.mine(whole, share[key])
        elif key == "step":
            share[key] = max((items["step"] for items in found if items), key=float)
        else:
            share[key] = value
    return share


@functools.cache
def _before(methods: type) -> type:
    return type("ShardedSteps", (ShardedSteps, methods), {})


def shard(methods: type, optimizer: torch.optim.Optimizer, names: Sequence[str], terms: Terms) -> Any:
    """The sharded optimizer for `optimizer`, whose state it divides; `optimizer` must not be used afterwards.

    methods: the methods that every DistributedOptimizer has.
    """
    check_elementwise(optimizer)
    if terms.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ValueError("shard_optimizer_state=True needs op=Average or op=Sum")
    before = optimizer.state_dict()
    groups = [list(group["params"]) for group in optimizer.param_groups]
    named = dict(zip((param for params in groups for param in params), names, strict=True))
    base: Any = type(optimizer)
    distributed: Any = adopt(class_over(_before(methods), base), optimizer)
    shares = Shares(groups, named, terms)
    distributed._gradients = shares
    distributed._should_synchronize, distributed._synchronized, distributed._for_scaler = True, False, False
    distributed._agreed = False
    distributed._param_names = [group.pop("param_names", None) for group in optimizer.param_groups]
    for number, group in enumerate(distributed.param_groups):
        group["params"] = shares.shards(number)
    distributed.state.clear()
    if before["state"]:
        distributed.load_state_dict(before)
    return distributed
