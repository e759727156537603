# Compares the parameters of the ranks, at the first step and then rarely, and warns about the first one that differs.
# Touches torch, the log and the settings of the world; layouts.py sends what it compares.
"""`Comparison` computes two small numbers from each parameter. layouts.py sends them with its question.

The numbers are rounded: different processors give results that differ in the last bits, which is no mistake.
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
STEPS_PER_TENSOR = 10  # between two comparisons for each parameter, if there are many parameters
SAMPLE = 1024  # how many elements of each parameter are compared
PARTS = 2  # of a sample; each part gives a number
BYTES = 2 * PARTS  # how many bytes of the question belong to a parameter
# By how much two ranks may differ. Rounding errors are far smaller, and parameters made with another seed differ more.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 1e-2, torch.bfloat16: 1e-2}
MIN_HALVES = 64  # of elements with 16 bits; rounding errors of fewer elements may be larger than the tolerance

_log = logging.getLogger("farandole")


class Comparison:
    """When the parameters of one optimizer are compared, and what was found."""

    def __init__(self, process_set: ProcessSet) -> None:
        self._process_set = process_set
        self.begin()
        self.steps_alone = False  # the script steps without reducing, so its parameters may differ
        self._warned = False

    def begin(self) -> None:
        """Counts from 0 again. Called in a new world, and after all ranks have called join()."""
        self._steps = 0
        self._asked_at = -1  # the step of the last comparison
        self._joins = 0 if runtime.waiting else runtime.world.joins
        config = runtime.config
        self.off = not (config.hints and config.check_parameters)  # after the first answer: whether any rank said so

    def count(self) -> None:
        """A step has ended on all ranks."""
        self._steps += 1

    def due(self, slots: Sequence[Slot]) -> bool:
        """Whether this step compares. The result is the same on all ranks. The first step always does: a rank
        on which comparisons are off sends zeros.
        """
        if self._joins != runtime.world.joins:
            off = self.off
            self.begin()
            self.off = off
        if self._asked_at == self._steps or (self.off and self._steps):
            return False
        return self._steps % max(STEPS, STEPS_PER_TENSOR * len(slots)) == 0

    def question(self, slots: Sequence[Slot]) -> list[int]:
        """What this rank sends: for each number a byte and its complement; zeros for parameters that are not compared.

        From the largest of each byte on all ranks, `answer` finds the largest and the smallest number.
        """
        self._asked_at = self._steps
        numbers = [0] * (BYTES * len(slots))
        if self.off or self.steps_alone:
            return numbers
        compared = [index for index, slot in enumerate(slots) if _comparable(slot.param)]
        sums = [part for index in compared for part in _sums(slots[index].param)]
        values = torch.stack([one.to(sums[0].device) for one in sums]).tolist() if sums else []
        for position, value in enumerate(values):
            index = compared[position // PARTS]
            if 0.0 < value < math.inf:
                number = math.floor(math.log(value) / math.log1p(TOLERANCE[slots[index].param.dtype])) % 256
                start = BYTES * index + 2 * (position % PARTS)
                numbers[start : start + 2] = number, 255 - number
        return numbers

    def answer(self, slots: Sequence[Slot], largest: Sequence[int], order: Sequence[Slot]) -> None:
        """Warns, once and on one rank, if parameters differ. `largest`: for each byte, its largest value on all ranks.

        `order`: the slots in the order of the optimizer's parameters.
        """
        differ = {
            slot.user_name
            for index, slot in enumerate(slots)
            if any(_differ(*largest[start : start + 2]) for start in range(BYTES * index, BYTES * (index + 1), 2))
        }
        if not differ or self._warned:
            return
        self._warned = True
        if runtime.world.engine.rank != min(self._process_set.ranks or [0]):
            return
        first = next(slot.user_name for slot in order if slot.user_name in differ)
        _log.warning(
            "the ranks train different models: %s is the first of %d parameters that differ between ranks. Call "
            "hvd.broadcast_parameters(model.state_dict(), root_rank=0) before the first step, and after a rank alone "
            "has loaded or changed parameters; hvd.check_equal(model) lists all (FARANDOLE_CHECK_PARAMETERS=0 switches "
            "this comparison off)",
            first,
            len(differ),
        )


def _comparable(param: torch.Tensor) -> bool:
    """Whether this is a plain tensor that is trained here: a frozen one may differ on purpose."""
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
    """Whether numbers differ by more than rounding. They are counted modulo 256, so 255 and 0 are neighbours."""
    return 2 <= largest + complement - 255 <= 253
