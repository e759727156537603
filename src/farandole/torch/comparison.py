# Compares the parameters of the ranks, at the first step and then rarely, and warns about the first one that differs.
# Touches torch, the log and the settings of the world; layouts.py sends what it compares.
"""`Comparison` makes two small numbers of each parameter. layouts.py sends them with its question.

The numbers are rounded: hosts with other processors compute other last bits, which is no mistake.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch

from ..world.groups import ProcessSet
from ..world.runtime import runtime
from .slots import Slot

STEPS = 1000  # between two comparisons
STEPS_PER_TENSOR = 10  # and more of them if there are many parameters
SAMPLE = 1024  # elements of each parameter that are compared
PARTS = 2  # of a sample; each gives a number
BYTES = 2 * PARTS  # of each parameter in the question
# How much two ranks may differ: rounding errors stay far below it, and parameters of other seeds are beyond it.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 1e-2, torch.bfloat16: 1e-2}
MIN_HALVES = 64  # elements of 16 bits; fewer of them may differ by more than the tolerance after rounding

_log = logging.getLogger("farandole")


class Comparison:
    """When the parameters of one optimizer are compared, and what was found."""

    def __init__(self, process_set: ProcessSet) -> None:
        self._process_set = process_set
        self.begin()
        self.steps_alone = False  # the script steps without reducing, so its parameters may differ
        self._told = False

    def begin(self) -> None:
        """A new world, or all ranks have joined: all of them count from here."""
        self._steps = 0
        self._asked = -1
        self._joins = 0 if runtime.waiting else runtime.world.joins
        config = runtime.place
        self.off = not (config.hints and config.check_parameters)  # agreed on by the first answer

    def count(self) -> None:
        """A step has ended on all ranks."""
        self._steps += 1

    def due(self, slots: Sequence[Slot]) -> bool:
        """Whether this step compares: all ranks say the same. The first step always does, with nothing if it is off."""
        if self._joins != runtime.world.joins:
            off = self.off
            self.begin()
            self.off = off
        if self._asked == self._steps or (self.off and self._steps):
            return False
        return self._steps % max(STEPS, STEPS_PER_TENSOR * len(slots)) == 0

    def question(self, slots: Sequence[Slot]) -> list[int]:
        """What this rank says: for each number a byte and its complement; zeros where it compares nothing.

        The largest bytes of all ranks tell the largest and the smallest number.
        """
        self._asked = self._steps
        numbers = [0] * (BYTES * len(slots))
        if self.off or self.steps_alone:
            return numbers
        compared = [place for place, slot in enumerate(slots) if _comparable(slot.param)]
        sums = [part for place in compared for part in _sums(slots[place].param)]
        values = torch.stack([one.to(sums[0].device) for one in sums]).tolist() if sums else []
        for index, value in enumerate(values):
            place = compared[index // PARTS]
            if 0.0 < value < math.inf:
                number = math.floor(math.log(value) / math.log1p(TOLERANCE[slots[place].param.dtype])) % 256
                at = BYTES * place + 2 * (index % PARTS)
                numbers[at : at + 2] = number, 255 - number
        return numbers

    def answer(self, slots: Sequence[Slot], largest: Sequence[int], order: Sequence[Slot]) -> None:
        """Warns, once and on one rank, if parameters differ. `largest`: the largest of each byte of all ranks.

        `order`: the slots in the order of the optimizer's parameters.
        """
        differ = {
            slot.given
            for place, slot in enumerate(slots)
            if any(_differ(*largest[at : at + 2]) for at in range(BYTES * place, BYTES * (place + 1), 2))
        }
        if not differ or self._told:
            return
        self._told = True
        if runtime.world.engine.rank != min(self._process_set.ranks or [0]):
            return
        first = next(slot.given for slot in order if slot.given in differ)
        _log.warning(
            "the ranks train different models: %s is the first of %d parameters that differ between ranks. Call "
            "hvd.broadcast_parameters(model.state_dict(), root_rank=0) before the first step, and after a rank alone "
            "has loaded or changed parameters; hvd.check_equal(model) lists all (FARANDOLE_CHECK_PARAMETERS=0 switches "
            "this comparison off)",
            first,
            len(differ),
        )


def _comparable(param: torch.Tensor) -> bool:
    """Whether it is a plain tensor that is trained here: a frozen one may differ on purpose."""
    if type(param) not in (torch.nn.Parameter, torch.Tensor) or param.layout != torch.strided or param.is_meta:
        return False
    least = MIN_HALVES if param.element_size() == 2 else PARTS
    return param.requires_grad and param.dtype in TOLERANCE and param.numel() >= least


def _sums(param: torch.Tensor) -> list[torch.Tensor]:
    """The sums of the magnitudes in each part of the sample, which is at the beginning of the tensor."""
    sample = param.detach()
    for dimension in range(sample.dim()):
        if sample.numel() > SAMPLE:
            sample = sample.narrow(dimension, 0, max(1, sample.size(dimension) * SAMPLE // sample.numel()))
    flat = sample.reshape(-1)
    return [part.abs().sum(dtype=torch.float32) for part in flat.tensor_split(PARTS)]


def _differ(largest: int, complement: int) -> bool:
    """Whether numbers differ by more than rounding: 0 and 1 may be neighbours, and so may 255 and 0."""
    return 2 <= largest + complement - 255 <= 253
