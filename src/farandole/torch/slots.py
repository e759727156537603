# A slot is a parameter with its pending gradient. A bundle is slots that are sent together, packed or not.
# Touches torch, engine, groups and compression.
"""The data that buckets.py works with; nothing here calls the engine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from ..bindings.private.torch_names import copy_each
from ..engine.interface import Kind, ReduceOp, Request, Span
from ..world.groups import ProcessSet
from .compression import BF16Compressor, FP16Compressor, NoneCompressor

# Gradients up to this size are packed into one buffer: the copy costs less than one more tensor in the engine.
PACKED_BYTES = 64 << 10
# A batch is submitted when it has this many bytes. Large batches need fewer calls; small ones overlap more with
# backward.
BATCH_BYTES = 1 << 20
# The limit inside a host: links are fast there, other ranks need the cores, and each batch interrupts the computation.
ONE_HOST_BATCH_BYTES = 8 << 20

# With fewer small gradients than this, each has its own hook.
FEW = 8

# What the ranks know about the layout of a parameter's gradients.
UNKNOWN, DENSE, SPARSE = 0, 1, 2


Function = TypeVar("Function", bound=Callable[..., Any])


def without_graph(function: Function) -> Function:
    """torch.no_grad as a decorator that keeps the function's type for the type checker."""
    hidden: Any = torch.no_grad()(function)
    kept: Function = hidden
    return kept


@dataclass(frozen=True)
class Terms:
    """How gradients are reduced: the arguments of a DistributedOptimizer, already checked."""

    compression: Any
    op: ReduceOp
    process_set: ProcessSet
    passes: int = 1
    predivide: float = 1.0
    sparse_as_dense: bool = False


class Slot:
    """A parameter and its pending gradient."""

    __slots__ = (
        "agreed",
        "bundle",
        "bytes",
        "context",
        "delay",
        "grad",
        "hook",
        "layout",
        "param",
        "pending",
        "request",
        "tensor",
        "used",
        "user_name",
    )

    def __init__(self, param: torch.Tensor, user_name: str, name: str) -> None:
        self.param = param
        self.user_name = user_name  # `name` is unique among the gradients of this world
        self.request = Request(Kind.ALLREDUCE, name)
        self.bytes = param.numel() * param.element_size()
        self.delay = 1  # backward passes until the gradient is complete
        self.bundle: Bundle | None = None
        self.hook: Any = None
        self.layout = UNKNOWN
        self.agreed = False  # all ranks know the layout
        self.used = True  # some rank wants a gradient for this parameter, so all ranks send one
        self.pending = False  # the gradient is complete and not reduced yet
        self.grad: torch.Tensor | None = None  # where the result is written
        self.tensor: torch.Tensor | None = None  # what is sent: the gradient itself, or a copy in another form
        self.context: Any = None  # for decompress

    @property
    def name(self) -> str:
        return self.request.name or ""

    def fill(self) -> None:
        """Sets the gradient to zeros if none was computed."""
        param = self.param
        if param.grad is None:
            param.grad = no_rows(param) if self.layout == SPARSE else torch.zeros_like(param).detach()

    def stand_in(self) -> torch.Tensor:
        """What a rank sends for a parameter that it has frozen: no rows, or negative zeros, which differ from zeros."""
        if self.layout == SPARSE:
            return no_rows(self.param)
        return torch.full_like(self.param, -0.0, memory_format=torch.contiguous_format).detach()

    def take(self, result: torch.Tensor) -> None:
        """Gives a frozen parameter the gradient of the other ranks. If all ranks have frozen it, it gets none."""
        if not frozen_everywhere(result):
            self.param.grad = result.to(self.param.dtype, copy=True)

    def forget(self) -> None:
        """Releases the memory of an operation that has ended."""
        self.grad = self.tensor = self.context = None
        self.request.input = self.request.output = self.request.pieces = None


class Bundle:
    """Gradients that are submitted together: a group that the user chose, or a packed bucket."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = slots
        self.missing = len(slots)  # number of slots whose gradients have not arrived
        for slot in slots:
            slot.bundle = self

    def wanted(self) -> list[Slot]:
        """All slots except those that are frozen on all ranks."""
        return [slot for slot in self.slots if slot.pending or slot.used]


class SharedHook:
    """One slot of a list, whose hook is enough for all of them: hooks cost more time than small gradients.

    A removed hook costs as much as a hook that does nothing, so the other slots never get one.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slot = next(
            (slot for slot in slots if slot.hook is not None),
            next((slot for slot in slots if slot.param.requires_grad), slots[0]),
        )
        later = [slot.param for slot in slots[len(slots) // 2 :] if slot is not self.slot]
        self._later = later[:: max(1, len(later) // 8)]

    def comes_first(self) -> bool:
        """Whether the later gradients do not exist yet. If so, those found at the end of backward are new."""
        return all(param.grad is None for param in self._later)

    def is_useful(self, slots: Sequence[Slot]) -> bool:
        """Whether no other slot has a hook, and the slots are not few: a few slots should have one hook each."""
        return len(slots) >= FEW and all(slot.hook is None for slot in slots if slot is not self.slot)


class PackedBucket(Bundle):
    """Small gradients that are one tensor for the engine: in place, or packed into one buffer."""

    def __init__(self, slots: Sequence[Slot], dtype: torch.dtype) -> None:
        super().__init__(slots)
        first = slots[0]
        self.flat = torch.zeros(sum(slot.param.numel() for slot in slots), dtype=dtype, device=first.param.device)
        self.views = [
            part.view(slot.param.shape)
            for slot, part in zip(slots, self.flat.split([slot.param.numel() for slot in slots]), strict=True)
        ]
        self._params: list[Any] = [slot.param for slot in slots]
        self._pieces = np.array([[0, slot.bytes] for slot in slots], np.int64)  # the address and bytes of each gradient
        self._found: list[Any] = []  # the gradients that complete() found, until scatter() takes them
        self._grads: list[Any] = []  # the gradients that load() copied
        self._parts: list[Any] = []  # their parts of the buffer
        more = f" and {len(slots) - 1} more" if len(slots) > 1 else ""
        self.slot = Slot(self.flat, first.user_name, first.name + more)
        self.shared_hook = SharedHook(slots)
        self.deferred = False  # one shared hook; the bucket is submitted when backward ends

    def complete(self) -> bool:
        """Marks all gradients as arrived if all exist; returns whether it did."""
        self._found = [param.grad for param in self._params]
        if any(grad is None for grad in self._found):
            self._found = []
            return False
        for slot in self.slots:
            slot.pending = True
        self.missing = 0
        return True

    def scatter(self) -> bool:
        """Lets the engine use the gradients in place. False if they are not all dense, contiguous and of one type."""
        grads, self._found = self._found or [param.grad for param in self._params], []
        if not self.flat.is_cpu or (self.missing and not all(slot.pending for slot in self.slots)):
            return False
        try:
            self._pieces[:, 0] = np.fromiter(map(torch.Tensor.data_ptr, grads), np.int64, len(grads))
            plain = all(map(torch.Tensor.is_contiguous, grads)) and not any(map(torch.Tensor.is_neg, grads))
            if not plain or {grad.dtype for grad in grads} != {self.flat.dtype}:
                return False
        except (RuntimeError, TypeError):  # one of them is sparse, or the script has removed it
            return False
        request = self.slot.request
        request.input = request.output = Span(0, tuple(self.flat.shape), grads, grads)
        request.pieces = self._pieces
        return True

    def hold(self) -> None:
        """Keeps the gradients' memory: `grad.data = other` releases it while the engine still uses it."""
        pieces = self.slot.request.input
        pieces.memory = list(map(torch.Tensor.untyped_storage, pieces.owner))

    @without_graph
    def load(self) -> None:
        """Copies the gradients into the buffer, and stand-ins for frozen parameters."""
        self.slot.request.pieces = None
        self._grads = [slot.param.grad for slot in self.slots]
        self._parts = self.views
        try:
            if all(slot.pending for slot in self.slots):
                copy_each(self.views, self._grads)
                return
        except (RuntimeError, TypeError):  # one of them is sparse, or the script has removed it
            pass
        self._grads, self._parts = [], []
        for slot, view in zip(self.slots, self.views, strict=True):
            if slot.pending:
                slot.fill()
                grad: Any = slot.param.grad  # fill() has made sure that there is one
                if grad.layout != torch.strided:
                    grad = slot.param.grad = grad.to_dense()
                self._grads.append(grad)
                self._parts.append(view)
                view.copy_(grad)
            else:
                view.fill_(-0.0)

    @without_graph
    def unload(self) -> None:
        """Copies the results from the buffer into the gradients."""
        if len(self._parts) < len(self.slots):
            for slot, view in zip(self.slots, self.views, strict=True):
                if not slot.pending:
                    slot.take(view)
        if self._grads:
            copy_each(self._grads, self._parts)
        self._grads = []


def no_rows(param: torch.Tensor) -> torch.Tensor:
    """A sparse gradient without rows."""
    values = torch.empty((0, *param.shape[1:]), dtype=param.dtype, device=param.device)
    indices = torch.empty((1, 0), dtype=torch.int64, device=param.device)
    return torch.sparse_coo_tensor(indices, values, param.shape, check_invariants=False)


def frozen_everywhere(result: torch.Tensor) -> bool:
    """Whether every rank sent a stand-in: only negative zeros have a negative zero as their sum."""
    if result.layout != torch.strided:
        return bool(result.coalesce().indices().shape[1] == 0)
    return bool((result.eq(0) & result.signbit()).all())


def packing(compression: Any) -> Callable[[torch.dtype], torch.dtype] | None:
    """Gives the type in which elements are sent. None for the user's own compressor, which may need whole tensors."""
    if compression not in (NoneCompressor, FP16Compressor, BF16Compressor):
        return None

    def sent_type(dtype: torch.dtype) -> torch.dtype:
        compressed: torch.dtype = compression.compress(torch.empty(0, dtype=dtype))[0].dtype
        return compressed

    return sent_type


def small(slot: Slot) -> bool:
    """Whether it can be part of a packed bucket if its gradients are dense."""
    return slot.bundle is None and 0 < slot.bytes <= PACKED_BYTES


def packed_buckets(
    slots: Iterable[Slot], sent_type: Callable[[torch.dtype], torch.dtype], limit: int
) -> list[PackedBucket]:
    """Packs small gradients. Backward begins with the last parameter, so a bucket takes parameters in reverse order."""
    open_: dict[Any, list[Slot]] = {}
    made: list[PackedBucket] = []

    def close(key: Any) -> None:
        members = open_.pop(key)
        if len(members) > 1:
            made.append(PackedBucket(members, sent_type(members[0].param.dtype)))

    for slot in reversed([slot for slot in slots if slot.layout == DENSE and small(slot)]):
        key = (slot.param.dtype, slot.param.device)
        members = open_.setdefault(key, [])
        members.append(slot)
        if sum(member.bytes for member in members) >= limit:
            close(key)
    for key in list(open_):
        close(key)
    return made


def digest(slots: Iterable[Slot], compression: Any) -> bytes:
    """A hash that is equal on ranks that would pack in the same way."""
    text = [f"{slot.name} {tuple(slot.param.shape)} {slot.param.dtype} {slot.bundle is None}" for slot in slots]
    compressor = getattr(compression, "__name__", type(compression).__name__)  # programs give classes and instances
    return hashlib.sha256("\n".join([compressor, *text]).encode()).digest()[:8]
