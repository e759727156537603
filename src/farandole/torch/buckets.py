# Gradients on their way: hooks that note them, batches that go to the engine while backward runs, and the wait.
# Touches torch, compression, memory, ops and the NumPy layer below. Knows no optimizer.
"""`Gradients` reduces the gradients of a list of parameters, in place, as they come."""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..engine import Engine, Kind, ReduceOp, Request
from ..groups import ProcessSet
from ..pending import Beginning, synchronize
from ..runtime import World, runtime
from . import memory
from .compression import Compression
from .ops import allreduce_, sparse_allreduce_async

# A batch goes to the engine when it holds this much. Fewer calls cost less; earlier ones overlap more of backward.
BATCH_BYTES = 1 << 20
BATCH_TENSORS = 64

# What is known about the layout of a parameter's gradients.
UNKNOWN, DENSE, SPARSE = 0, 1, 2

# How often each name is in use in a world: optimizers over models that share names must not meet under them.
_names: weakref.WeakKeyDictionary[World, Counter[tuple[int, str]]] = weakref.WeakKeyDictionary()


class Slot:
    """A parameter and the gradient of it that is under way."""

    __slots__ = (
        "agreed",
        "bundle",
        "bytes",
        "context",
        "given",
        "grad",
        "hook",
        "layout",
        "param",
        "pending",
        "request",
        "tensor",
    )

    def __init__(self, param: torch.Tensor, given: str, name: str) -> None:
        self.param = param
        self.given = given  # the user's name; the other is unique among the gradients of this world
        self.request = Request(Kind.ALLREDUCE, name)
        self.bytes = param.numel() * param.element_size()
        self.bundle: Bundle | None = None
        self.hook: Any = None
        self.layout = UNKNOWN
        self.agreed = False  # the layout is what all ranks know
        self.pending = False  # the gradient is complete, and not reduced yet
        self.grad: torch.Tensor | None = None  # where the result goes
        self.tensor: torch.Tensor | None = None  # what travels: the gradient itself, or a copy of another form
        self.context: Any = None  # for decompress

    @property
    def name(self) -> str:
        return self.request.name or ""


class Bundle:
    """A group of the user's: its gradients become ready together."""

    __slots__ = ("missing", "slots")

    def __init__(self, slots: list[Slot]) -> None:
        self.slots = slots
        self.missing = len(slots)  # not arrived yet
        for slot in slots:
            slot.bundle = self


class Batch:
    """Slots that went to the engine by one call, and how to wait for them."""

    __slots__ = ("slots", "wait")

    def __init__(self, slots: Sequence[Slot], wait: Callable[[], None]) -> None:
        self.slots = slots
        self.wait = wait


def _wait_for(engine: Engine, handles: list[int]) -> Callable[[], None]:
    def wait() -> None:
        failure: Exception | None = None
        while handles:
            try:
                engine.wait(handles[-1])
            except Exception as error:
                failure = failure or error
            handles.pop()
        if failure is not None:
            raise failure

    handles.reverse()  # so that the first is popped first
    return wait


class Gradients:
    """The gradients of some parameters, reduced over a process set."""

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        names: Sequence[str],
        *,
        compression: Any,
        passes: int,
        op: ReduceOp,
        predivide: float,
        bundles: Iterable[Sequence[torch.Tensor]],
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self.compression = compression
        self.passes = passes
        self.op = op
        self.predivide = predivide
        self.sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        self.plain = compression is Compression.none
        self.slots: dict[torch.Tensor, Slot] = {}
        self.delays: dict[torch.Tensor, int] = {}  # backward passes still to come before the gradient is complete
        self.active = False
        self._open: list[Slot] = []  # those whose layout the ranks have not agreed on
        self._ready: list[Slot] = []
        self._ready_bytes = 0
        self._batches: list[Batch] = []
        self._lock = threading.Lock()  # hooks of parameters on several devices run in several threads
        self._world: weakref.ref[World] | None = None
        self._hooks: list[Any] = []
        weakref.finalize(self, _remove, self._hooks)
        self._look_at_world()
        self.add(params, names)
        self.bundles = [Bundle([self.slots[param] for param in members if param in self.slots]) for members in bundles]

    # --- parameters --------------------------------------------------------------------------------------------------

    def add(self, params: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        """More parameters; all ranks add the same ones in the same order."""
        used = _names.setdefault(runtime.world, Counter())
        group = self.process_set.process_set_id or 0
        for param, name in zip(params, names, strict=True):
            again = used[group, name]
            used[group, name] += 1
            slot = Slot(param, name, f"allreduce.{name}" + (f".{again}" if again else ""))
            self.slots[param] = slot
            self.delays[param] = self.passes
            self._open.append(slot)
        self._fill_requests()
        self._attach()

    def _look_at_world(self) -> None:
        """After init() in another world the group's number, its size and what the ranks know can be different."""
        world = runtime.world
        if self._world is not None and self._world() is world:
            return
        if self.process_set.included() is None:
            world.groups.members(self.process_set)  # says what is wrong
        self.active = bool(self.process_set.included()) and (self.process_set.size() or 1) > 1
        self._world = weakref.ref(world)
        self._open = list(self.slots.values())
        for slot in self._open:
            slot.agreed = False
        self._fill_requests()

    def _fill_requests(self) -> None:
        for slot in self.slots.values():
            request = slot.request
            request.op = self.op
            request.group = self.process_set.process_set_id or 0
            if self.op == ReduceOp.AVERAGE and self.predivide != 1.0:
                request.prescale, request.postscale = 1.0 / self.predivide, self.predivide

    def _attach(self) -> None:
        """Hooks on parameters that want gradients and have none yet: new ones, and those that were frozen before."""
        if not self.active and os.environ.get("HOROVOD_ELASTIC") != "1":
            return
        reference = weakref.ref(self)
        for slot in self.slots.values():
            if slot.hook is None and slot.param.requires_grad:
                slot.hook = slot.param.register_post_accumulate_grad_hook(_hook(reference, slot))
                self._hooks.append(slot.hook)

    def set_passes(self, passes: int) -> None:
        self.passes = passes
        self.delays.update(dict.fromkeys(self.slots, passes))

    # --- on the way --------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether gradients are under way, or about to be."""
        return bool(self._batches or self._ready) or any(len(b.slots) > b.missing for b in self.bundles)

    def arrived(self, slot: Slot) -> None:
        """The gradient is complete: it goes with the next batch, or with its group when that is complete."""
        with self._lock:
            if slot.pending:
                raise AssertionError(
                    "Gradients were computed more than backward_passes_per_step times before call to step(). "
                    "Increase backward_passes_per_step to accumulate gradients locally."
                )
            slot.pending = True
            bundle = slot.bundle
            if bundle is not None:
                bundle.missing -= 1
                if bundle.missing:
                    return
                batch = bundle.slots
            else:
                self._ready.append(slot)
                self._ready_bytes += slot.bytes
                if self._ready_bytes < BATCH_BYTES and len(self._ready) < BATCH_TENSORS:
                    return
                batch = self._take_ready()
        self._submit(batch, bundle is not None)

    def _take_ready(self) -> list[Slot]:
        batch, self._ready, self._ready_bytes = self._ready, [], 0
        return batch

    def _submit(self, slots: Sequence[Slot], bundle: bool) -> None:
        """Hands gradients to the engine; when that fails they are as if they had not arrived."""
        self._look_at_world()
        try:
            for batch in self._begin([slot for slot in slots if not self._begin_sparse(slot)], bundle):
                self._batches.append(batch)
        except BaseException:
            for slot in slots:
                slot.pending = False
            raise

    def _begin_sparse(self, slot: Slot) -> bool:
        """Brings the gradient into the layout that the ranks agreed on; a sparse one begins its journey here."""
        grad = slot.param.grad
        assert grad is not None
        sparse = grad.layout != torch.strided
        if not slot.agreed:
            slot.layout = SPARSE if sparse and not self.sparse_as_dense else DENSE
        if slot.layout == DENSE:
            if sparse:
                slot.param.grad = grad.to_dense()
            return False
        result = sparse_allreduce_async(grad if sparse else grad.to_sparse(1), slot.name, self.op, self.process_set)

        def wait() -> None:
            slot.param.grad = result()

        self._batches.append(Batch([slot], wait))
        return True

    def _begin(self, slots: Sequence[Slot], bundle: bool) -> Iterable[Batch]:
        """Submits dense gradients: those in CPU memory at once, those of a device by way of its staging."""
        near: list[Slot] = []
        far: dict[torch.device, list[Slot]] = {}
        for slot in slots:
            grad = tensor = slot.param.grad
            assert grad is not None
            if not self.plain:
                tensor, slot.context = self.compression.compress(grad)
            if not tensor.is_contiguous():
                tensor = tensor.contiguous()
            slot.grad, slot.tensor = grad, tensor
            if tensor.is_cpu:
                buffer = memory.buffer_of(tensor)
                request = slot.request
                request.input = request.output = buffer.array
                request.dtype = buffer.dtype
                near.append(slot)
            else:
                far.setdefault(tensor.device, []).append(slot)
        if near:
            engine = runtime.world.engine
            handles = engine.submit([slot.request for slot in near], bundle)
            yield Batch(near, _wait_for(engine, handles))
        for distant in far.values():
            yield self._begin_far(distant, bundle)

    def _begin_far(self, slots: Sequence[Slot], bundle: bool) -> Batch:
        def build(buffers: list[Any], _: bool) -> Beginning:
            for slot, buffer in zip(slots, buffers, strict=True):
                slot.request.input = slot.request.output = buffer.array
                slot.request.dtype = buffer.dtype
            return Beginning(runtime.world, [slot.request for slot in slots], lambda outcomes: None, bundle)

        handle = memory.begin([slot.tensor for slot in slots if slot.tensor is not None], True, True, build).handle()
        return Batch(slots, lambda: synchronize(handle))

    # --- the end of a step -------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Reduces what has not been reduced, gradients that were not computed as zeros, and waits for everything."""
        try:
            self._look_at_world()
            if self.active:
                self._attach()
                if self._ready:
                    self._submit(self._take_ready(), False)
                self._agree()
                self._submit_missing()
        finally:
            self.drain()

    def drain(self) -> None:
        """Waits for what is under way and begins anew; raises the first error."""
        failure: Exception | None = None
        while self._batches:
            batch = self._batches[0]
            try:
                batch.wait()
                for slot in batch.slots:
                    self._deliver(slot)
            except Exception as error:
                failure = failure or error
            del self._batches[0]
            for slot in batch.slots:
                slot.grad = slot.tensor = slot.context = slot.request.input = slot.request.output = None
        self._take_ready()
        for slot in self.slots.values():
            slot.pending = False
        for bundle in self.bundles:
            bundle.missing = len(bundle.slots)
        self.delays.update(dict.fromkeys(self.slots, self.passes))
        if failure is not None:
            raise failure

    def _deliver(self, slot: Slot) -> None:
        if slot.tensor is slot.grad or slot.tensor is None or slot.grad is None:
            return
        result = slot.tensor if self.plain else self.compression.decompress(slot.tensor, slot.context)
        if result is not slot.grad:
            slot.grad.detach().copy_(result)

    def _agree(self) -> None:
        """The ranks tell each other which gradients are sparse, once: who has none must know what to send instead."""
        asked = [slot for slot in self._open if slot.param.requires_grad]
        if not asked or self.sparse_as_dense:
            return
        known = torch.tensor([self._layout_of(slot) for slot in asked], dtype=torch.uint8)
        allreduce_(known, name=f"layouts.{asked[0].name}", op=ReduceOp.MAX, process_set=self.process_set)
        for slot, layout in zip(asked, known.tolist(), strict=True):
            slot.layout, slot.agreed = layout, layout != UNKNOWN
        self._open = [slot for slot in self._open if not slot.agreed]

    @staticmethod
    def _layout_of(slot: Slot) -> int:
        grad = slot.param.grad
        if slot.pending:
            return slot.layout
        return UNKNOWN if grad is None else DENSE if grad.layout == torch.strided else SPARSE

    def _submit_missing(self) -> None:
        # Frozen parameters stay as they are, on all ranks alike.
        for bundle in self.bundles:
            if bundle.missing:
                self._submit_as_it_is([slot for slot in bundle.slots if slot.pending or slot.param.requires_grad], True)
        slots = [s for s in self.slots.values() if not s.pending and s.bundle is None and s.param.requires_grad]
        for at in range(0, len(slots), BATCH_TENSORS):
            self._submit_as_it_is(slots[at : at + BATCH_TENSORS], False)

    def _submit_as_it_is(self, slots: Sequence[Slot], bundle: bool) -> None:
        for slot in slots:
            param = slot.param
            slot.pending = True
            if param.grad is None:
                param.grad = _no_rows(param) if slot.layout == SPARSE else torch.zeros_like(param).detach()
        self._submit(slots, bundle)

    def handles(self) -> dict[torch.Tensor, tuple[Any, Any]]:
        """Parameters whose gradients are under way, as Horovod shows them."""
        return {slot.param: (slot.name, slot.context) for slot in self.slots.values() if slot.pending}


def _no_rows(param: torch.Tensor) -> torch.Tensor:
    values = torch.empty((0, *param.shape[1:]), dtype=param.dtype, device=param.device)
    indices = torch.empty((1, 0), dtype=torch.int64, device=param.device)
    return torch.sparse_coo_tensor(indices, values, param.shape, check_invariants=False)


def _hook(reference: weakref.ref[Gradients], slot: Slot) -> Callable[[torch.Tensor], None]:
    """What autograd calls when it has added to the parameter's gradient. It keeps no optimizer alive."""

    def arrived(param: torch.Tensor) -> None:
        gradients = reference()
        if gradients is None or not gradients.active:
            return
        delays = gradients.delays
        left = delays[param] = delays[param] - 1
        if left <= 0:
            gradients.arrived(slot)

    return arrived


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
