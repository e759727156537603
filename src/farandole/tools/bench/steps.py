"""The parts that train: step times of ours, of DDP and of pinned single processes, and the memory that training takes.
Asks pools; returns rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any

from . import processes
from .plan import Plan, Row, Samples, row
from .processes import Failed
from .rank_pools import RankPool, RankPools

NAMES = {"farandole": "farandole", "gloo": "DDP on Gloo", "peer": "other Horovod", "alone": "single"}
# The same, but each step waits for the slowest rank: no synchronous training can be faster. And with one copy of each
# gradient after backward, by all ranks at once: the cost of memory if gradients must be copied.
LIMITS = {"single, in step": {"in_step": True}, "in step, one copy": {"in_step": True, "copied": True}}
CLOSE = 1e-3  # the largest relative difference between the gradients of two libraries


def check(name: str, answers: list[dict[str, Any]], reference: list[float] | None) -> list[float]:
    """Same bits of all parameters on all ranks, and the gradients of the reference; Failed otherwise."""
    if name != "alone" and len({answer["digest"] for answer in answers}) != 1:
        raise Failed(f"{NAMES[name]}: the ranks' parameters differ after training")
    found: list[float] = answers[0]["gradients"]
    if reference is not None:
        apart = math.dist(found, reference)
        if not apart <= CLOSE * math.hypot(*reference):
            raise Failed(f"{NAMES[name]}: the first step's gradients are not the mean of the ranks'")
    return found


def step(answers: list[dict[str, Any]]) -> float:
    """Seconds of a step: the median of each rank's, averaged over the ranks."""
    return statistics.fmean(statistics.median(answer["times"]) for answer in answers)


def compare(
    pools_by_size: RankPools, pools: dict[str, RankPool], case: str, steps: int, repeats: int
) -> tuple[dict[str, Samples], int]:
    """Alternating repeats of one case; our gradients are compared with DDP's if it runs. Also returns their bytes."""
    values: dict[str, Samples] = {}
    reference: list[float] | None = None
    amount = 0
    for repeat in range(repeats + 1):
        for name, pool in pools.items():
            if repeat > 0 and NAMES[name] not in values:
                continue
            answers = pools_by_size.attempt(
                pool, f"{NAMES[name]}: {case}", "train", case=case, steps=steps if repeat else 1
            )
            if answers is None:
                values.pop(NAMES[name], None)
                continue
            if repeat == 0 and name != "alone":
                reference = check(name, answers, reference)
            elif name != "alone":
                check(name, answers, None)
            values.setdefault(NAMES[name], [])
            amount = answers[0]["bytes"]
            if repeat > 0:
                values[NAMES[name]].append(step(answers))
            if repeat > 0 and name == "alone" and pool.ranks > 1:
                for limit, how in LIMITS.items():
                    values.setdefault(limit, []).append(step(pool.ask("train", case=case, steps=steps, **how)))
    return values, amount


def training(plan: Plan, pools_by_size: RankPools) -> Iterator[Row]:
    """Each case with 1, 2, 4 ... ranks."""
    if not processes.has_torch():
        pools_by_size.note("training: not measured without torch")
        return
    for ranks in plan.training_ranks:
        with pools_by_size.pools(ranks, ["farandole", "gloo", "peer", "alone"]) as pools:
            for case, steps in plan.steps.items():
                values, amount = compare(pools_by_size, pools, case, steps, plan.repeats)
                # Checked by comparison: with DDP's gradients, and the bits of all ranks with each other.
                yield row("training", case, ranks, "s", values, bytes=amount, checked=len(values["farandole"]) * ranks)


def memory(plan: Plan, pools_by_size: RankPools) -> Iterator[Row]:
    """How much more memory a rank needs than a single process with the same training, after some steps."""
    if not processes.has_torch():
        pools_by_size.note("memory: not measured without torch")
        return
    case = "vgg" if "vgg" in plan.steps else "many"
    # New processes, because memory of earlier measurements would be counted.
    with pools_by_size.pools(plan.ranks[0], ["farandole", "gloo", "alone"], keep=not plan.in_earnest) as pools:
        taken: dict[str, Samples] = {}
        amount = 0
        for _ in range(plan.repeats):
            for name, pool in pools.items():
                trained = pools_by_size.attempt(pool, f"{NAMES[name]}: memory", "train", case=case, steps=1)
                if trained is not None:
                    amount = trained[0]["bytes"]
                    size = statistics.fmean(answer["pss"] for answer in pool.ask("memory"))
                    taken.setdefault(NAMES[name], []).append(size)
    yield row("memory", f"{case}: proportional set size", plan.ranks[0], "B", taken, bytes=amount)
