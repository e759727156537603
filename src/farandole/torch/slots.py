# A parameter's gradient under way, the groups of them that go together, and small ones packed into one piece of memory.
# Touches torch, engine and compression.
"""What buckets.py moves about; nothing here talks to the engine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from ..engine import Kind, Request, Span
from ..private.torch_names import copy_each
from .compression import BF16Compressor, FP16Compressor, NoneCompressor

# Gradients up to this size are copied into a common piece of memory: that costs less than what every tensor costs.
PACKED_BYTES = 64 << 10
# A batch goes to the engine when it holds this much. Fewer calls cost less; earlier ones overlap more of backward.
BATCH_BYTES = 1 << 20
# Inside a host, where bytes travel fast and other ranks need the cores: each batch interrupts what is computed.
NEAR_BATCH_BYTES = 8 << 20

# Fewer small gradients than these have a hook each.
FEW = 8

# What is known about the layout of a parameter's gradients.
UNKNOWN, DENSE, SPARSE = 0, 1, 2


Function = TypeVar("Function", bound=Callable[..., Any])


def without_graph(function: Function) -> Function:
    """torch.no_grad, which as a decorator hides the types from the checker."""
    hidden: Any = torch.no_grad()(function)
    kept: Function = hidden
    return kept


class Slot:
    """A parameter and the gradient of it that is under way."""

    __slots__ = (
        "agreed",
        "bundle",
        "bytes",
        "context",
        "delay",
        "given",
        "grad",
        "hook",
        "layout",
        "param",
        "pending",
        "request",
        "tensor",
        "used",
    )

    def __init__(self, param: torch.Tensor, given: str, name: str) -> None:
        self.param = param
        self.given = given  # the user's name; the other is unique among the gradients of this world
        self.request = Request(Kind.ALLREDUCE, name)
        self.bytes = param.numel() * param.element_size()
        self.delay = 1  # backward passes still to come before the gradient is complete
        self.bundle: Bundle | None = None
        self.hook: Any = None
        self.layout = UNKNOWN
        self.agreed = False  # the layout is what all ranks know
        self.used = True  # the parameter wants a gradient on some rank, so that all send one
        self.pending = False  # the gradient is complete, and not reduced yet
        self.grad: torch.Tensor | None = None  # where the result goes
        self.tensor: torch.Tensor | None = None  # what travels: the gradient itself, or a copy of another form
        self.context: Any = None  # for decompress

    @property
    def name(self) -> str:
        return self.request.name or ""

    def fill(self) -> None:
        """Zeros where nothing was computed."""
        param = self.param
        if param.grad is None:
            param.grad = no_rows(param) if self.layout == SPARSE else torch.zeros_like(param).detach()

    def stand_in(self) -> torch.Tensor:
        """What a rank sends for a parameter that is frozen there: nothing, in a form that tells it from zeros."""
        if self.layout == SPARSE:
            return no_rows(self.param)
        return torch.full_like(self.param, -0.0, memory_format=torch.contiguous_format).detach()

    def take(self, result: torch.Tensor) -> None:
        """Gives a frozen parameter the others' gradient; where all have frozen it, it stays without one."""
        if not frozen_everywhere(result):
            self.param.grad = result.to(self.param.dtype, copy=True)

    def forget(self) -> None:
        """Lets go of the memory of a journey that has ended."""
        self.grad = self.tensor = self.context = None
        self.request.input = self.request.output = self.request.pieces = None


class Bundle:
    """Gradients that go together: a group of the user's."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = slots
        self.missing = len(slots)  # not arrived yet
        for slot in slots:
            slot.bundle = self

    def wanted(self) -> list[Slot]:
        """All but those that are frozen on all ranks."""
        return [slot for slot in self.slots if slot.pending or slot.used]


class Herald:
    """The one of some gradients whose hook speaks for all: hooks cost more than small gradients do.

    A hook that is removed costs as much as one that does nothing, so the others have none from the start.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slot = next(
            (slot for slot in slots if slot.hook is not None),
            next((slot for slot in slots if slot.param.requires_grad), slots[0]),
        )
        later = [slot.param for slot in slots[len(slots) // 2 :] if slot is not self.slot]
        self._later = later[:: max(1, len(later) // 8)]

    def comes_first(self) -> bool:
        """Whether those that come later are not there yet, so that gradients found then have come since."""
        return all(param.grad is None for param in self._later)

    def alone(self, slots: Sequence[Slot]) -> bool:
        """Whether none of the others has a hook; few of them had better have one each."""
        return len(slots) >= FEW and all(slot.hook is None for slot in slots if slot is not self.slot)


class Parcel(Bundle):
    """Small gradients in one piece of memory: to the engine they are one tensor."""

    def __init__(self, slots: Sequence[Slot], dtype: torch.dtype) -> None:
        super().__init__(slots)
        first = slots[0]
        self.flat = torch.zeros(sum(slot.param.numel() for slot in slots), dtype=dtype, device=first.param.device)
        self.views = [
            part.view(slot.param.shape)
            for slot, part in zip(slots, self.flat.split([slot.param.numel() for slot in slots]), strict=True)
        ]
        self._params: list[Any] = [slot.param for slot in slots]
        self._pieces = np.array([[0, slot.bytes] for slot in slots], np.int64)  # addresses and bytes
        self._found: list[Any] = []  # the gradients, when it has just been looked whether all are there
        self._grads: list[Any] = []  # those that were copied in, and
        self._parts: list[Any] = []  # where
        more = f" and {len(slots) - 1} more" if len(slots) > 1 else ""
        self.slot = Slot(self.flat, first.given, first.name + more)
        self.herald = Herald(slots)
        self.quiet = False  # the herald's is the only hook, and the parcel goes when backward ends

    def complete(self) -> bool:
        """Takes all gradients as arrived when all are there."""
        self._found = [param.grad for param in self._params]
        if any(grad is None for grad in self._found):
            self._found = []
            return False
        for slot in self.slots:
            slot.pending = True
        self.missing = 0
        return True

    def scatter(self) -> bool:
        """Lets the engine work on the gradients where they lie; False when they are not all of one plain kind."""
        grads, self._found = self._found or [param.grad for param in self._params], []
        if not self.flat.is_cpu or (self.missing and not all(slot.pending for slot in self.slots)):
            return False
        try:
            self._pieces[:, 0] = np.fromiter(map(torch.Tensor.data_ptr, grads), np.int64, len(grads))
            plain = all(map(torch.Tensor.is_contiguous, grads)) and not any(map(torch.Tensor.is_neg, grads))
            if not plain or {grad.dtype for grad in grads} != {self.flat.dtype}:
                return False
        except (RuntimeError, TypeError):  # a sparse one among them, or one that the script has taken away
            return False
        request = self.slot.request
        request.input = request.output = Span(0, tuple(self.flat.shape), grads, grads)
        request.pieces = self._pieces
        return True

    def hold(self) -> None:
        """Keeps the gradients' memory: by `grad.data = other` a script gives it away while the engine still uses it."""
        places = self.slot.request.input
        places.memory = list(map(torch.Tensor.untyped_storage, places.owner))

    @without_graph
    def load(self) -> None:
        """Copies the gradients in; stand-ins for parameters that are frozen."""
        self.slot.request.pieces = None
        self._grads = [slot.param.grad for slot in self.slots]
        self._parts = self.views
        try:
            if all(slot.pending for slot in self.slots):
                copy_each(self.views, self._grads)
                return
        except (RuntimeError, TypeError):  # a sparse one among them, or one that the script has taken away
            pass
        self._grads, self._parts = [], []
        for slot, view in zip(self.slots, self.views, strict=True):
            if slot.pending:
                slot.fill()
                grad: Any = slot.param.grad  # fill() has seen to it that there is one
                if grad.layout != torch.strided:
                    grad = slot.param.grad = grad.to_dense()
                self._grads.append(grad)
                self._parts.append(view)
                view.copy_(grad)
            else:
                view.fill_(-0.0)

    @without_graph
    def unload(self) -> None:
        """Copies the results out, into the gradients they came from."""
        if len(self._parts) < len(self.slots):
            for slot, view in zip(self.slots, self.views, strict=True):
                if not slot.pending:
                    slot.take(view)
        if self._grads:
            copy_each(self._grads, self._parts)
        self._grads = []


def no_rows(param: torch.Tensor) -> torch.Tensor:
    """A sparse gradient with nothing in it."""
    values = torch.empty((0, *param.shape[1:]), dtype=param.dtype, device=param.device)
    indices = torch.empty((1, 0), dtype=torch.int64, device=param.device)
    return torch.sparse_coo_tensor(indices, values, param.shape, check_invariants=False)


def frozen_everywhere(result: torch.Tensor) -> bool:
    """Whether every rank sent a stand-in: sums of negative zeros alone are negative zeros."""
    if result.layout != torch.strided:
        return bool(result.coalesce().indices().shape[1] == 0)
    return bool((result.eq(0) & result.signbit()).all())


def packing(compression: Any) -> Callable[[torch.dtype], torch.dtype] | None:
    """How elements of a type travel; None when the compressor is the user's own and may look at whole tensors."""
    if compression not in (NoneCompressor, FP16Compressor, BF16Compressor):
        return None

    def travelling(dtype: torch.dtype) -> torch.dtype:
        compressed: torch.dtype = compression.compress(torch.empty(0, dtype=dtype))[0].dtype
        return compressed

    return travelling


def small(slot: Slot) -> bool:
    """Whether it can go in a parcel, if its gradients are dense."""
    return slot.bundle is None and 0 < slot.bytes <= PACKED_BYTES


def parcels(slots: Iterable[Slot], travelling: Callable[[torch.dtype], torch.dtype], limit: int) -> list[Parcel]:
    """Packs the small ones. Backward comes from the last to the first: so neighbours in that order go together."""
    open_: dict[Any, list[Slot]] = {}
    made: list[Parcel] = []

    def close(key: Any) -> None:
        members = open_.pop(key)
        if len(members) > 1:
            made.append(Parcel(members, travelling(members[0].param.dtype)))

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
    """Equal on ranks that would pack alike."""
    text = [f"{slot.name} {tuple(slot.param.shape)} {slot.param.dtype} {slot.bundle is None}" for slot in slots]
    return hashlib.sha256("\n".join([compression.__name__, *text]).encode()).digest()[:8]
