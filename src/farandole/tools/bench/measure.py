"""The parts that compare collectives: by size, with more ranks than cores, with 16-bit floats.
Asks pools; returns rows."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from . import processes
from .plan import MIB, Plan, Row, Samples, row
from .rank_pools import RankPool, RankPools, ours

NAMES = {"farandole": "farandole", "gloo": "Gloo", "mpi": "MPI", "peer": "other Horovod"}


@dataclass(frozen=True)
class Contender:
    """A library that is timed: its pool, and the command for it."""

    name: str
    pool: RankPool
    command: dict[str, Any]


def slowest(answers: list[dict[str, Any]]) -> float:
    """The median over calls; a call has ended when its slowest rank has its result."""
    calls: Iterator[tuple[float, ...]] = zip(*(answer["times"] for answer in answers), strict=True)
    return statistics.median(max(times) for times in calls)


def contenders(pools: dict[str, RankPool], operation: str, dtype: str) -> list[Contender]:
    """Our library through torch and NumPy, other libraries, and the limits of the machine."""
    found = []
    for name, pool in pools.items():
        if name == "limits":
            found.append(Contender("memcpy", pool, {"operation": "memcpy"}))
            found.append(Contender("copy by all", pool, {"operation": "copy"}))
            continue
        if name == "farandole" and dtype == "float32":
            found.append(Contender("farandole (NumPy)", pool, {"operation": operation, "interface": "numpy"}))
        if name == "farandole" and not processes.has_torch():
            continue
        found.append(Contender(NAMES[name], pool, {"operation": operation, "interface": "torch"}))
    return found


def race(
    pools_by_size: RankPools, runners: list[Contender], repeats: int, command: dict[str, Any]
) -> tuple[dict[str, Samples], int]:
    """Every repeat runs each library in turn, so that other load affects all of them. Returns the medians of the
    repeats, and how many of our results were checked."""
    values: dict[str, Samples] = {}
    checked = 0
    for repeat in range(repeats + 1):  # the first repeat only warms up: pages, plans, connections
        for runner in runners:
            if repeat > 0 and runner.name not in values:
                continue
            warm = {"count": min(3, command["count"])} if repeat == 0 else {}
            what = f"{runner.name}: {runner.command['operation']} of {command['dtype']}"
            answers = pools_by_size.attempt(runner.pool, what, "collective", **{**command, **runner.command, **warm})
            if answers is None:
                values.pop(runner.name, None)
                continue
            values.setdefault(runner.name, [])
            if repeat > 0:
                values[runner.name].append(slowest(answers))
                if runner.name.startswith("farandole"):
                    checked += sum(answer["checked"] for answer in answers)
    return values, checked


def collectives(plan: Plan, pools_by_size: RankPools) -> Iterator[Row]:
    """Every operation by size, with a tensor that is used again and with a new one each time."""
    for ranks in plan.ranks:
        edge = ranks in (plan.ranks[0], plan.ranks[-1])
        with pools_by_size.pools(ranks, ["farandole", "gloo", "mpi", "peer", "limits"]) as pools:
            for operation in plan.operations if edge else {"allreduce"} & set(plan.operations):
                sizes = plan.allreduce_sizes if operation == "allreduce" else plan.other_sizes
                for size in sizes:
                    for kind in ("reused", "fresh") if operation == "allreduce" or plan.fresh_others else ("reused",):
                        command = {"bytes": size, "kind": kind, "dtype": "float32", "count": plan.count(size)}
                        values, checked = race(
                            pools_by_size, contenders(pools, operation, "float32"), plan.repeats, command
                        )
                        more = {"bytes": size, "kind": kind, "dtype": "float32", "checked": checked}
                        yield row("collectives", operation, ranks, "s", values, **more)


def crowd(plan: Plan, pools_by_size: RankPools) -> Iterator[Row]:
    """Twice as many ranks as cores, compared with as many as cores (at least two)."""
    fit = max(2, plan.cores)
    with pools_by_size.pools(2 * fit, ["farandole", "gloo"]) as pools:
        fitting = pools_by_size.open("farandole", fit, ours(fit))
        try:
            for size in plan.crowd_sizes:
                command = {"bytes": size, "kind": "reused", "dtype": "float32", "count": plan.count(size)}
                runners = [one for one in contenders(pools, "allreduce", "float32") if "NumPy" not in one.name]
                runners = runners or contenders(pools, "allreduce", "float32")
                interface = "torch" if processes.has_torch() else "numpy"
                alone = Contender(
                    f"farandole, {fit} ranks", fitting, {"operation": "allreduce", "interface": interface}
                )
                values, checked = race(pools_by_size, [*runners, alone], plan.repeats, command)
                more = {"bytes": size, "kind": "reused", "dtype": "float32", "checked": checked}
                yield row("crowd", "allreduce", 2 * fit, "s", values, **more)
        finally:
            fitting.close()


def halves(plan: Plan, pools_by_size: RankPools) -> Iterator[Row]:
    """16-bit floats compared with float32, by bytes, and what the kernel does alone on one core."""
    if not processes.has_torch():
        pools_by_size.note("halves: not measured without torch")
        return
    from . import kernels

    with pools_by_size.pools(plan.ranks[0], ["farandole", "gloo"]) as pools:
        for size in plan.half_sizes:
            for dtype in ("float32", "float16", "bfloat16"):
                command = {"bytes": size, "kind": "reused", "dtype": dtype, "count": plan.count(size)}
                runners = [one for one in contenders(pools, "allreduce", dtype) if "NumPy" not in one.name]
                values, checked = race(pools_by_size, runners, plan.repeats, command)
                values["kernel alone"] = kernels.measure(dtype, min(size, 16 * MIB), size, plan.repeats)
                more = {"bytes": size, "kind": "reused", "dtype": dtype, "checked": checked}
                yield row("halves", "allreduce", plan.ranks[0], "s", values, **more)
