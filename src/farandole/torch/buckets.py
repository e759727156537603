# Reduces gradients in buckets: hooks report them, batches go to the engine during backward, and step() waits.
# Touches torch, hooks, layouts, slots, sending, ops, private and the NumPy layer below. Knows no optimizer.
"""`Gradients` reduces the gradients of a list of parameters in place, as soon as they are computed.

In each step, a gradient goes through these states:

        MISSING ──▶ READY ──▶ SUBMITTED ──▶ MISSING
           │                      ▲
           └──────────────────────┘

- MISSING to READY (`arrived`): its hook reports it. The first one of a step asks autograd to call `flush`.
- READY to SUBMITTED: alone, when its batch is full; with its group or packed bucket, when all of that are ready; in a
  deferred bucket, and what is left of a batch, when backward ends (`flush`).
- MISSING to SUBMITTED (`synchronize`): step() was called and it was not computed; zeros are sent.
- SUBMITTED to MISSING (`drain`): all results have arrived, and the next step begins.

layouts.py decides between steps what is sent for a parameter; hooks.py decides which parameters have hooks.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..bindings.private.torch_names import after_backward
from ..engine.interface import ReduceOp
from ..world.runtime import runtime
from ..world.world import World
from .compression import Compression
from .hooks import Hooks
from .layouts import Layouts
from .ops import sparse_allreduce_async
from .sending import Batch, begin, begin_scattered
from .slots import (
    BATCH_BYTES,
    DENSE,
    ONE_HOST_BATCH_BYTES,
    SPARSE,
    Bundle,
    PackedBucket,
    Slot,
    Terms,
    packed_buckets,
    packing,
    small,
)

BATCH_TENSORS = 64  # counts only tensors that are not packed

# Counts the uses of each name in a world: optimizers whose models have equal names must not send under the same one.
_names: weakref.WeakKeyDictionary[Any, Counter[tuple[int, str]]] = weakref.WeakKeyDictionary()


class Gradients:
    """Reduces the gradients of some parameters over a process set."""

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        names: Sequence[str],
        bundles: Iterable[Sequence[torch.Tensor]],
        terms: Terms,
    ) -> None:
        self.terms = terms
        self.passes = terms.passes  # set_passes() changes it
        self.plain = terms.compression is Compression.none
        self.slots: dict[torch.Tensor, Slot] = {}
        self.groups: list[Bundle] = []  # the groups that the user chose
        self.packed_buckets: list[PackedBucket] = []
        self.active = False
        self.layouts = Layouts(terms)
        self.hooks = Hooks(self)
        self._ready: list[Slot] = []  # READY, for the next batch
        self._ready_bytes = 0
        self._ready_packed: list[PackedBucket] = []  # deferred buckets whose shared hook has run
        self._unhooked_ready = False  # the shared hook of the unhooked slots ran first, so flush() takes them too
        self._flush_due = False  # autograd will call flush() when the backward pass ends
        self._batches: list[Batch] = []  # SUBMITTED
        self._lock = threading.Lock()  # parameters on several devices have hooks that run in several threads
        self._world: weakref.ref[World] | None = None
        self._check_world()
        self._add(params, names)
        self.groups = [Bundle([self.slots[param] for param in members if param in self.slots]) for members in bundles]
        self._attach_few()

    # --- parameters --------------------------------------------------------------------------------------------------

    def add(self, params: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        """Adds parameters; all ranks must add the same ones."""
        self._add(params, names)
        self._attach_few()

    def _add(self, params: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        used = _names.setdefault(runtime if runtime.waiting else runtime.world, Counter())
        group = self.terms.process_set.process_set_id or 0
        for param, name in zip(params, names, strict=True):
            again = used[group, name]
            used[group, name] += 1
            slot = Slot(param, name, f"allreduce.{name}" + (f".{again}" if again else ""))
            slot.delay = self.passes
            self._address(slot)
            self.slots[param] = slot
            self.layouts.add(slot)
        self.layouts.name_after(self.slots.values())

    def _address(self, slot: Slot) -> None:
        request = slot.request
        request.op = self.terms.op
        request.group = self.terms.process_set.process_set_id or 0
        if self.terms.op == ReduceOp.AVERAGE and self.terms.predivide != 1.0:
            request.prescale, request.postscale = 1.0 / self.terms.predivide, self.terms.predivide

    def _check_world(self) -> None:
        """In a new world the group's number and size can differ, and the ranks must agree on layouts again."""
        if runtime.waiting:
            return  # this rank has no world yet; it checks again at its first gradient
        world = runtime.world
        if self._world is not None and self._world() is world:
            return
        if self.terms.process_set.included() is None:
            world.groups.members(self.terms.process_set)  # raises the error that says what is wrong
        self.active = bool(self.terms.process_set.included()) and (self.terms.process_set.size() or 1) > 1
        self._batch_bytes = BATCH_BYTES if world.config.cross_size > 1 else ONE_HOST_BATCH_BYTES
        self._world = weakref.ref(world)
        for packed in self.packed_buckets:
            for slot in packed.slots:
                slot.bundle = None
        self.packed_buckets = []
        self.layouts.reopen(self.slots.values())
        for slot in self.slots.values():
            self._address(slot)
        self._attach_few()

    def _attach_few(self) -> None:
        """Calls _attach. Where buckets can be deferred, small slots lose their hooks first: one shared hook stays."""
        if self._can_defer() and packing(self.terms.compression) is not None:
            without = [slot for slot in self.layouts.open if slot.hook is None and slot.param.is_cpu and small(slot)]
            self.hooks.unhook(without)
        self._attach()

    def _attach(self) -> None:
        if self.active or runtime.config.elastic:
            self.hooks.attach(self.slots.values())

    def _can_defer(self) -> bool:
        """Whether hooks of small gradients cost more time than they save: links inside a host are fast."""
        return self.passes == 1 and runtime.config.cross_size == 1

    def steps_alone(self) -> None:
        """The script steps with the gradients of this rank alone, so the parameters of the ranks differ on purpose."""
        self.layouts.comparison.steps_alone = True

    def set_passes(self, passes: int) -> None:
        self.passes = passes
        if passes > 1:  # each gradient counts its own passes, so each needs a hook
            for packed in self.packed_buckets:
                packed.deferred = False
            self.hooks.unhook([])
            self._attach()
        for slot in self.slots.values():
            slot.delay = passes

    # --- pending gradients -------------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether gradients are submitted or about to be submitted."""
        if self._batches or self._ready:
            return True
        return any(bundle.missing < len(bundle.slots) for bundle in (*self.groups, *self.packed_buckets))

    def arrived(self, slot: Slot) -> None:
        """The gradient is complete: it is submitted with the next batch, or with its bundle when that is complete."""
        self._check_world()
        if not self.active:
            return
        with self._lock:
            if slot.pending:
                raise AssertionError(
                    "Gradients were computed more than backward_passes_per_step times before call to step(). "
                    "Increase backward_passes_per_step to accumulate gradients locally."
                )
            slot.pending = True
            if not self._flush_due:
                self._flush_due = True
                after_backward(_flush(weakref.ref(self)))
            bundle = slot.bundle
            if bundle is not None:
                bundle.missing -= 1
                if isinstance(bundle, PackedBucket) and bundle.deferred:
                    bundle.deferred = bundle.shared_hook.comes_first()
                    if bundle.deferred:
                        self._ready_packed.append(bundle)
                    else:
                        self._attach()  # in time for the gradients that are still to come
                    return
                if bundle.missing:
                    return
            else:
                shared = self.hooks.shared
                if shared is not None and slot is shared.slot:
                    self._unhooked_ready = shared.comes_first()
                    if not self._unhooked_ready:
                        self.hooks.unhook([])
                        self._attach()
                self._ready.append(slot)
                self._ready_bytes += slot.bytes
                if self._ready_bytes < self._batch_bytes and len(self._ready) < BATCH_TENSORS:
                    return
                batch = self._take_ready()
        if bundle is None:
            self._submit(batch)
        else:
            self._submit_bundle(bundle)

    def flush(self) -> None:
        """Submits what is ready: another rank may step its optimizers in another order and wait for these first."""
        self._flush_due = False
        with self._lock:
            if self._unhooked_ready:
                self._add_unhooked()
            batch = self._take_ready()
            ready, self._ready_packed = self._ready_packed, []
        if batch:
            self._submit(batch)
        if not self.layouts.asking:
            self.layouts.ask()
        for packed in ready:
            if packed.complete():  # otherwise step() sends it, with zeros for missing gradients
                self._submit_bundle(packed, ending=len(ready) == 1)

    def _add_unhooked(self) -> None:
        """The unhooked slots are ready if all have gradients; otherwise step() sends them."""
        unhooked = self.hooks.unhooked
        if all(slot.param.grad is not None for slot in unhooked):
            for slot in unhooked:
                if not slot.pending:
                    slot.pending = True
                    self._ready.append(slot)

    def _take_ready(self) -> list[Slot]:
        batch, self._ready, self._ready_bytes = self._ready, [], 0
        return batch

    def _submit_bundle(self, bundle: Bundle, ending: bool = False) -> None:
        wanted = bundle.wanted() if bundle.missing else bundle.slots
        if not wanted:
            return
        if not isinstance(bundle, PackedBucket):
            self._submit(wanted, True)
            return
        flat = bundle.slot
        if self.plain and runtime.world.engine.supports_pieces and bundle.scatter():
            begin_scattered(bundle, self._batches, ending)
            return
        bundle.load()
        flat.grad = flat.tensor = bundle.flat
        [sent] = begin([flat], False)

        def wait() -> None:
            sent.wait()
            bundle.unload()

        self._batches.append(Batch([flat], wait))

    def _submit(self, slots: Sequence[Slot], together: bool = False) -> None:
        """Submits gradients to the engine. If that fails, they count as not arrived."""
        try:
            dense = [slot for slot in slots if not self._begin_sparse(slot)]
            for slot in dense:
                slot.grad = slot.tensor = slot.param.grad if slot.pending else slot.stand_in()
                if not self.plain:
                    slot.tensor, slot.context = self.terms.compression.compress(slot.grad)
                sent: Any = slot.tensor
                if not sent.is_contiguous():
                    slot.tensor = sent.contiguous()
            for batch in begin(dense, together):
                self._batches.append(batch)
        except BaseException:
            for slot in slots:
                slot.pending = False
            raise

    def _begin_sparse(self, slot: Slot) -> bool:
        """Converts the gradient to the agreed layout. A sparse one is submitted here; returns whether it was."""
        grad = slot.param.grad if slot.pending else slot.stand_in()
        assert grad is not None
        sparse = grad.layout != torch.strided
        if not slot.agreed:
            slot.layout = SPARSE if sparse and not self.terms.sparse_as_dense else DENSE
        if slot.layout == DENSE:
            if sparse:
                slot.param.grad = grad.to_dense()
            return False
        result = sparse_allreduce_async(
            grad if sparse else grad.to_sparse(1), slot.name, self.terms.op, self.terms.process_set
        )

        def wait() -> None:
            if slot.pending:
                slot.param.grad = result()
            else:
                slot.take(result())

        self._batches.append(Batch([slot], wait))
        return True

    # --- the end of a step -------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Reduces the remaining gradients, with zeros for those that were not computed, and waits for all."""
        try:
            self._check_world()
            if self.active:
                if self.hooks.missing():
                    self._attach()
                self.flush()
                while self.layouts.asking:
                    self.layouts.answer()
                self._submit_missing()
        finally:
            self.layouts.comparison.count()
            self.drain()

    def drain(self) -> None:
        """Waits for all pending gradients and resets the state; raises the first error."""
        failure: Exception | None = None
        while self.layouts.asking:
            try:
                self.layouts.answer()
            except Exception as error:
                failure = failure or error
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
                slot.forget()
        self._begin_anew()
        if failure is not None:
            raise failure

    def _begin_anew(self) -> None:
        self._take_ready()
        self.layouts.forget()
        self._flush_due = False
        self._ready_packed = []
        self._unhooked_ready = False
        passes = self.passes
        for slot in self.slots.values():
            slot.pending = False
            slot.delay = passes
        sent_type = packing(self.terms.compression)
        new = self.layouts.take_new()
        if new and sent_type is not None:
            made = packed_buckets(new, sent_type, self._batch_bytes)
            for packed in made:
                self._address(packed.slot)
                packed.deferred = (
                    packed.flat.is_cpu and self._can_defer() and packed.shared_hook.is_useful(packed.slots)
                )
            self.packed_buckets += made
        unhooked = self.hooks.unhooked
        if any(slot.agreed for slot in unhooked):
            self.hooks.unhook([slot for slot in unhooked if not slot.agreed])
            self._attach()
        for bundle in (*self.groups, *self.packed_buckets):
            bundle.missing = len(bundle.slots)

    def _deliver(self, slot: Slot) -> None:
        if slot.tensor is None or slot.grad is None:
            return
        if slot.tensor is not slot.grad:
            result = slot.tensor if self.plain else self.terms.compression.decompress(slot.tensor, slot.context)
            if result is not slot.grad:
                slot.grad.detach().copy_(result)
        if not slot.pending and slot.param is not slot.grad:  # neither a gradient nor a packed bucket: a stand-in
            slot.take(slot.grad)

    def _submit_missing(self) -> None:
        for bundle in (*self.groups, *self.packed_buckets):
            if bundle.missing:
                self._complete(bundle.wanted())
                self._submit_bundle(bundle)
        alone = [slot for slot in self.slots.values() if not slot.pending and slot.bundle is None and slot.used]
        for at in range(0, len(alone), BATCH_TENSORS):
            batch = alone[at : at + BATCH_TENSORS]
            self._complete(batch)
            self._submit(batch)

    def _complete(self, slots: Iterable[Slot]) -> None:
        """Fills gradients that were not computed with zeros. Frozen parameters get none; a stand-in is sent."""
        for slot in slots:
            if not slot.pending and slot.param.requires_grad:
                slot.fill()
                slot.pending = True

    def handles(self) -> dict[torch.Tensor, tuple[Any, Any]]:
        """Parameters whose gradients are pending, in the form that Horovod shows."""
        return {slot.param: (slot.name, slot.context) for slot in self.slots.values() if slot.pending}


def _flush(reference: weakref.ref[Gradients]) -> Callable[[], None]:
    def end_of_backward() -> None:
        gradients = reference()
        if gradients is not None:
            gradients.flush()

    return end_of_backward
