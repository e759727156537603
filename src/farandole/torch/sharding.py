# ZeRO-1 for DistributedOptimizer: each rank keeps and updates its share of the optimizer's state.
# Touches torch; the rooms bindings.private, operations and world; the files ops and slots.
"""Buckets of gradients are reduce-scattered during backward, each rank steps its share, and parameters are gathered."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..bindings.private.torch_names import copy_each
from ..operations.pending import synchronize
from ..operations.reductions import Sum
from ..world.runtime import runtime
from ..world.world import World
from .ops import allgather_async, allreduce_, reducescatter_async
from .slots import Terms, without_graph

BUCKET_BYTES = 16 << 20

# Counts them in a world: optimizers whose models have equal names must not send under the same names.
_made: weakref.WeakKeyDictionary[World, int] = weakref.WeakKeyDictionary()

# These step each element independently of its tensor. Only such optimizers can work on a share.
ELEMENTWISE = tuple(
    getattr(torch.optim, name)
    for name in ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"]
)


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """ValueError unless the optimizer's step can be divided among ranks."""
    if isinstance(optimizer, ELEMENTWISE):
        return
    names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
    raise ValueError(
        f"shard_optimizer_state=True needs an optimizer that steps every element by itself, one of {names}; "
        f"{type(optimizer).__name__} may use whole tensors"
    )


class Bucket:
    """Neighbouring parameters as one flat row, divided into equal shares, one for each rank."""

    def __init__(self, params: Sequence[torch.Tensor], name: str, group: int, index: int, ranks: int) -> None:
        self.params = params
        self.name = name
        self.group = group  # the number of the optimizer's parameter group
        self.sizes = [param.numel() for param in params]
        self.elements = sum(self.sizes)
        self.share = -(-self.elements // ranks)
        self.ranks = ranks
        first = params[0]
        self.shard = torch.nn.Parameter(torch.zeros(self.share, dtype=first.dtype, device=first.device))
        self.begin = min(index * self.share, self.elements)
        self.end = min(self.begin + self.share, self.elements)
        self.missing = len(params)
        self.handle: int | None = None
        self.context: Any = None

    @without_graph
    def row(self, tensors: Iterable[torch.Tensor | None]) -> torch.Tensor:
        """The tensors, one for each parameter, as one row; zeros replace None and fill the end."""
        first = self.params[0]
        row = torch.empty(self.share * self.ranks, dtype=first.dtype, device=first.device)
        row[self.elements :].zero_()
        for part, tensor in zip(row[: self.elements].split(self.sizes), tensors, strict=True):
            if tensor is None:
                part.zero_()
            else:
                part.view(tensor.shape).copy_(tensor.detach())
        return row

    @without_graph
    def mine(self, tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Copies this rank's share of the tensors (one for each parameter) to `out`."""
        at = 0
        for size, tensor in zip(self.sizes, tensors, strict=True):
            begin, end = max(self.begin, at), min(self.end, at + size)
            if begin < end:
                flat = tensor.detach().reshape(-1)
                out[begin - self.begin : end - self.begin].copy_(flat[begin - at : end - at])
            at += size

    def parts(self, row: torch.Tensor) -> list[torch.Tensor]:
        """The row as tensors with the shapes of the parameters."""
        pieces = row[: self.elements].split(self.sizes)
        return [piece.view(param.shape) for piece, param in zip(pieces, self.params, strict=True)]


class Shares:
    """Reduces gradients into shares; has the same methods as Gradients, which is used without sharding."""

    def __init__(self, groups: list[list[torch.Tensor]], names: dict[torch.Tensor, str], terms: Terms) -> None:
        self.terms = terms
        self.passes = terms.passes
        self.names = names
        self.groups = groups
        self.slots: dict[torch.Tensor, Any] = {}  # empty: scripts for Horovod read nothing here
        self.under_way = False
        self._hooks: list[Any] = []
        weakref.finalize(self, _remove, self._hooks)
        self._world: weakref.ref[World] | None = None
        self._number = 0
        self.cut()

    @property
    def pending(self) -> bool:
        return self.under_way

    @property
    def active(self) -> bool:
        return self.ranks > 1

    def cut(self) -> None:
        """Divides the parameters among the ranks, once in each world; all ranks must have the same parameters."""
        if self.in_this_world():
            return
        self._world = weakref.ref(runtime.world)
        # A rank that joins later makes its optimizers in the same order as the other ranks did.
        self._number = self._number or _made.get(runtime.world, 0) + 1
        _made[runtime.world] = max(_made.get(runtime.world, 0), self._number)
        self.ranks = self.terms.process_set.size() or 1
        self.index = self.terms.process_set.rank() or 0
        _remove(self._hooks)
        self._hooks.clear()
        self.delays: dict[torch.Tensor, int] = {}
        self.buckets: list[Bucket] = []
        for number, params in enumerate(self.groups):
            self._cut_group(number, params)

    def in_this_world(self) -> bool:
        """Whether the shares were made for the ranks of this world."""
        return self._world is not None and self._world() is runtime.world

    def add(self, params: list[torch.Tensor], names: Sequence[str]) -> None:
        """Adds a group of parameters."""
        self.names.update(zip(params, names, strict=True))
        self.groups.append(params)
        self._cut_group(len(self.groups) - 1, params)

    def _cut_group(self, number: int, params: Sequence[torch.Tensor]) -> None:
        """Backward begins with the last parameter, so neighbours in reverse order share a bucket."""
        waiting: dict[Any, list[torch.Tensor]] = {}

        def close(key: Any) -> None:
            members = waiting.pop(key)
            name = self.names[members[0]] + (f" and {len(members) - 1} more" if len(members) > 1 else "")
            bucket = Bucket(members, f"{self._number}.{number}.{name}", number, self.index, self.ranks)
            self.buckets.append(bucket)
            for param in members:
                self.delays[param] = self.passes
                hook: Any = param.register_post_accumulate_grad_hook(_hook(weakref.ref(self), bucket))
                self._hooks.append(hook)

        for param in reversed(params):
            if not param.requires_grad or param.numel() == 0:
                continue
            if param.layout != torch.strided:
                raise ValueError(f"shard_optimizer_state=True: {self.names[param]} has layout {param.layout}")
            key = (param.dtype, param.device)
            members = waiting.setdefault(key, [])
            members.append(param)
            if sum(member.numel() * member.element_size() for member in members) >= BUCKET_BYTES:
                close(key)
        for key in list(waiting):
            close(key)

    def shards(self, number: int) -> list[torch.Tensor]:
        """The shares that this rank steps for the optimizer's parameter group of this number."""
        return [bucket.shard for bucket in self.buckets if bucket.group == number]

    def steps_alone(self) -> None:
        """Nothing: all ranks have the same parameters after each step."""

    def set_passes(self, passes: int) -> None:
        self.passes = passes
        self.delays = dict.fromkeys(self.delays, passes)

    def arrived(self, param: torch.Tensor, bucket: Bucket) -> None:
        """Called when a backward pass has added to the gradient."""
        left = self.delays[param] = self.delays[param] - 1
        if left > 0:
            return
        if left < 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). "
                "Increase backward_passes_per_step to accumulate gradients locally."
            )
        self.under_way = True
        bucket.missing -= 1
        if bucket.missing == 0:
            self._send(bucket)

    def _send(self, bucket: Bucket) -> None:
        grads = [param.grad for param in bucket.params]
        row = bucket.row(grad.to_dense() if grad is not None and grad.is_sparse else grad for grad in grads)
        row, bucket.context = self.terms.compression.compress(row)
        bucket.handle = reducescatter_async(row, f"gradients.{bucket.name}", self.terms.op, self.terms.process_set)

    def synchronize(self) -> None:
        """Returns when the gradients of all shares are reduced; gradients that were not computed count as zeros."""
        if not self.in_this_world():
            raise RuntimeError(
                "the job has changed since the optimizer's state was divided among its ranks; call load_state_dict() "
                "with a state that was saved before"
            )
        for bucket in self.buckets:
            if bucket.handle is None:
                self._send(bucket)
        self._finish(self._receive)

    def _receive(self, bucket: Bucket, row: torch.Tensor) -> None:
        reduced = self.terms.compression.decompress(row, bucket.context)
        bucket.shard.grad = reduced.to(bucket.shard.dtype)

    def drain(self) -> None:
        """Waits for what is pending and discards it; raises the first error."""
        self._finish(lambda bucket, row: None)

    def _finish(self, use: Callable[[Bucket, torch.Tensor], None]) -> None:
        """Waits for what is pending, calls `use` with each result, and starts again; raises the first error."""
        failure: Exception | None = None
        for bucket in self.buckets:
            handle, bucket.handle = bucket.handle, None
            try:
                if handle is not None:
                    use(bucket, synchronize(handle))
            except Exception as error:
                failure = failure or error
        self.under_way = False
        self.delays = dict.fromkeys(self.delays, self.passes)
        for bucket in self.buckets:
            bucket.missing = len(bucket.params)
        if failure is not None:
            raise failure

    def handles(self) -> dict[torch.Tensor, tuple[Any, Any]]:
        return {}

    def load(self) -> None:
        """Copies the parameters to the shares: a broadcast or a checkpoint may have changed the parameters."""
        for bucket in self.buckets:
            bucket.mine(bucket.params, bucket.shard.data)

    @without_graph
    def publish(self) -> None:
        """Copies the shares of all ranks to the parameters."""
        for bucket, row in self.gathered("parameters", [bucket.shard.detach() for bucket in self.buckets]):
            copy_each([param.detach() for param in bucket.params], bucket.parts(row))

    def gathered(self, what: str, shares: Sequence[torch.Tensor]) -> Iterable[tuple[Bucket, torch.Tensor]]:
        """One row for each bucket, with the shares of all ranks."""
        handles = [
            allgather_async(share, f"{what}.{bucket.name}", self.terms.process_set)
            for bucket, share in zip(self.buckets, shares, strict=True)
        ]
        for bucket, handle in zip(self.buckets, handles, strict=True):
            yield bucket, synchronize(handle)

    def total(self, value: torch.Tensor, name: str, op: Any = Sum) -> torch.Tensor:
        """The sum, or another reduction, of all ranks' values."""
        return allreduce_(value, name=f"{name}.{self.buckets[0].name}", op=op, process_set=self.terms.process_set)


def _hook(reference: weakref.ref[Shares], bucket: Bucket) -> Callable[[torch.Tensor], None]:
    def arrived(param: torch.Tensor) -> None:
        shares = reference()
        if shares is not None:
            shares.arrived(param, bucket)

    return arrived


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
