# The property test: every collective, op, dtype and group against NumPy and the specification, on every kind of link.
# Touches both engines through World.
"""Random programs on 1, 2, 3, 4, 5 and 8 ranks; bits equal to the specification where promised, on all ranks always."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from programs import Program, check_program, programs, run_program
from world import ENGINES, World, add_groups

# CHAOS_N=10 (make chaos N=10) looks ten times as long.
EXAMPLES = 30 * int(os.environ.get("CHAOS_N", "1"))
ALGORITHMS = ["auto", "ring", "direct", "doubling", "tree"]
MIXED = {2: [1, 0], 3: [0, 1, 0], 4: [0, 0, 1, 1], 5: [2, 0, 0, 1, 2], 8: [0, 0, 0, 1, 1, 2, 1, 0]}


def topologies() -> list[Any]:
    """(hosts, algorithm, slot and chunk bytes): shared memory, TCP, both. Small slots make pipelines of short data."""
    table = [pytest.param([0], "auto", 4096, id="1-shm")]
    for size, mixed in MIXED.items():
        table.append(pytest.param([0] * size, "auto", 4096, id=f"{size}-shm"))
        table.append(pytest.param([0] * size, "auto", 65536, id=f"{size}-shm-wide"))
        for number, algorithm in enumerate(ALGORITHMS):
            small = 4096 if (size + number) % 2 else 65536
            table.append(pytest.param(list(range(size)), algorithm, small, id=f"{size}-tcp-{algorithm}"))
            if size > 2:
                table.append(pytest.param(mixed, algorithm, 69632 - small, id=f"{size}-both-{algorithm}"))
    return table


def groups_of(size: int) -> list[tuple[int, ...]]:
    """All ranks, and process sets that overlap."""
    everyone = tuple(range(size))
    more = [everyone[::2], everyone[-2:], everyone[-1:], everyone[: size // 2 + 1]]
    return [everyone, *sorted({group for group in more if group != everyone})]


def explore(make_world: Callable[[], World], examples: int, ring: bool) -> None:
    """Runs random programs in one world; after a failure in a new one, so that each failure is its own."""
    with contextlib.ExitStack() as stack:
        worlds: list[tuple[World, dict[tuple[int, ...], int]]] = []

        def new_world() -> None:
            world = stack.enter_context(make_world())
            sets = groups_of(world.size)
            numbers = world.run(lambda engine, rank: add_groups(engine, *sets[1:]) if sets[1:] else [])[0]
            worlds.append((world, dict(zip(sets, [0, *numbers], strict=True))))

        new_world()

        @settings(
            max_examples=examples, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(programs(groups_of(worlds[0][0].size)))
        def holds(program: Program) -> None:
            world, groups = worlds[-1]
            try:
                results = world.run(lambda engine, rank: run_program(engine, program, groups, 10.0), 20.0)
                check_program(program, results, world.hosts, ring)
            except BaseException:
                new_world()
                raise

        holds()


@pytest.mark.parametrize(("hosts", "algorithm", "piece"), topologies())
@pytest.mark.skipif("native" not in ENGINES, reason="the native library is not built")
def test_native(hosts: list[int], algorithm: str, piece: int) -> None:
    settings: dict[str, Any] = {"allreduce_algorithm": algorithm, "slot_bytes": piece, "chunk_bytes": piece}
    explore(lambda: World(hosts, **settings), EXAMPLES, algorithm == "ring")


@pytest.mark.parametrize("algorithm", ["auto", "ring"])
@pytest.mark.parametrize("hosts", [[0], [0, 0], [0, 1, 0], [0, 0, 1, 1], [2, 0, 0, 1, 2], [0] * 8], ids=len)
def test_reference(hosts: list[int], algorithm: str) -> None:
    explore(lambda: World(hosts, "python", allreduce_algorithm=algorithm), EXAMPLES // 2, algorithm == "ring")
