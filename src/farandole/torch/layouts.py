# The exchange of layouts: which gradients the ranks want, which are sparse, and which may be packed together.
# Touches torch; the rooms engine and operations; the files comparison, ops and slots.
"""A rank without a gradient must know whether to send something, and what. `Layouts` asks all ranks.

Each parameter is in one of three states, the same one on all ranks:

                   a rank has its gradient
        OPEN ────────────────────────────────────▶ AGREED: all ranks send it in every step
         ▲ │
         │ │ no rank wants a gradient
         │ ▼
        FROZEN: no rank sends it

When a rank unfreezes a FROZEN parameter, all FROZEN parameters become OPEN. In a new world all parameters are OPEN.
In some steps the question also has the numbers with which comparison.py compares the parameters themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ..engine.interface import ReduceOp
from ..operations.pending import synchronize
from .comparison import Comparison
from .ops import allreduce_async_
from .slots import DENSE, SPARSE, UNKNOWN, Slot, Terms, digest


class Layouts:
    """The states of the parameters, and the question to the other ranks that is pending."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.comparison = Comparison(terms.process_set)
        self.open: list[Slot] = []
        self._all: list[Slot] = []
        self._frozen: list[Slot] = []
        self._new: list[Slot] = []  # slots agreed on in this step, which all ranks would pack in the same way
        self._answer: Callable[[], None] | None = None  # waits for the answer to the pending question
        self._name = ""

    def add(self, slot: Slot) -> None:
        """A new parameter; all ranks add the same ones."""
        self.open.append(slot)
        self._all.append(slot)

    def name_after(self, slots: Iterable[Slot]) -> None:
        """Gives the question a name that is the same on all ranks."""
        self._name = "layouts." + min((slot.name for slot in slots), default="")

    def reopen(self, slots: Iterable[Slot]) -> None:
        """A new world: nothing is agreed on."""
        self.open, self._frozen = list(slots), []
        self.comparison.begin()
        for slot in self.open:
            slot.agreed, slot.used = False, True

    @property
    def asking(self) -> bool:
        """Whether a question is pending."""
        return self._answer is not None

    def answer(self) -> None:
        """Waits for the answer to the pending question; there may be another question after it."""
        if self._answer is not None:
            self._answer()

    def take_new(self) -> list[Slot]:
        """The slots that may be packed from the next step on."""
        new, self._new = self._new, []
        return new

    def forget(self) -> None:
        """The step has ended."""
        self._answer = None

    def ask(self) -> None:
        """Asks all ranks, once, which gradients are wanted, which are sparse, and how they would pack them.

        While parameters are frozen on all ranks, each step also asks, with one byte, whether a rank has unfrozen any.
        """
        comparing = bool(self._all) and self.comparison.due(self._all)
        if not self.open and not self._frozen and not comparing:
            return
        asked = self.open
        own_digest = digest(asked, self.terms.compression)
        digests = [*own_digest, *(255 - byte for byte in own_digest)]
        # Sorted by name: ranks may have their parameters in different orders.
        ordered = sorted(asked, key=lambda slot: slot.name)
        layouts = [self._layout_of(slot) for slot in ordered]
        wanted = [slot.param.requires_grad for slot in ordered]
        unfrozen = any(slot.param.requires_grad for slot in self._frozen)
        compared = sorted(self._all, key=lambda slot: slot.name) if comparing else []
        question = self.comparison.question(compared) if comparing else []
        message = torch.tensor(
            [unfrozen, self.comparison.off, *layouts, *wanted, *digests, *question], dtype=torch.uint8
        )
        handle = allreduce_async_(message, name=self._name, op=ReduceOp.MAX, process_set=self.terms.process_set)

        def agree() -> None:
            self._answer = None
            synchronize(handle)
            [any_unfrozen, off, *answer] = message.tolist()
            self.comparison.off = bool(off)
            if comparing:
                self.comparison.answer(compared, answer[len(answer) - len(question) :], self._all)
                del answer[len(answer) - len(question) :]
            count = len(ordered)
            for slot, layout, used in zip(ordered, answer[:count], answer[count : 2 * count], strict=True):
                slot.layout, slot.agreed, slot.used = layout, layout != UNKNOWN, bool(used)
            if answer[2 * count :] == digests:
                self._new += [slot for slot in asked if slot.agreed and slot.used]
            self._frozen += [slot for slot in asked if not slot.used]
            self.open = [slot for slot in asked if slot.used and not slot.agreed]
            if any_unfrozen:
                self.open, self._frozen = self.open + self._frozen, []
                self.ask()

        self._answer = agree

    def _layout_of(self, slot: Slot) -> int:
        grad = slot.param.grad
        if grad is None:
            return UNKNOWN
        return DENSE if grad.layout == torch.strided or self.terms.sparse_as_dense else SPARSE
