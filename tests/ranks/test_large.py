# Counts beyond 2^31 elements, where 32-bit arithmetic would go wrong. Two ranks as threads, in place: 4.3 GiB.
# Touches the native engine through World.
"""Looks at both ends and at the places where a 31-bit or 32-bit count would wrap."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from world import ENGINES, World, do

from farandole.engine.interface import Engine, Kind, ReduceOp, Request

COUNT = (1 << 31) + 4096 + 7
PLACES = [0, 1, (1 << 30) - 1, 1 << 30, (1 << 31) - 1, 1 << 31, COUNT - 1]
NEEDED = 2 * COUNT + (1 << 30)


def available() -> int:
    """Bytes that programs can allocate; the file cache counts as free, since the kernel releases it."""
    [found] = re.findall(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    return int(found) << 10


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("native" not in ENGINES, reason="the native library is not built"),
    pytest.mark.skipif(available() < NEEDED, reason=f"needs {NEEDED >> 20} MiB of memory"),
]


def at_places(array: Any) -> list[int]:
    return [int(array[place]) for place in PLACES]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("hosts", [[0, 0], [0, 1]], ids=["shm", "tcp"])
def test_more_elements_than_31_bits_can_count(hosts: list[int]) -> None:
    def body(engine: Engine, rank: int) -> tuple[list[int], list[int]]:
        array = np.zeros(COUNT, np.uint8)  # unused pages cost nothing
        array[PLACES] = np.arange(len(PLACES)) + 10 * rank + 1
        do(engine, Request(Kind.ALLREDUCE, "sum", array, array, op=ReduceOp.SUM), 300.0)
        summed = at_places(array)
        array[PLACES] = np.arange(len(PLACES)) + 100 * rank
        do(engine, Request(Kind.BROADCAST, "root", array, array, peer=1), 300.0)
        return summed, at_places(array)

    began = time.process_time()  # of both ranks: other work on the machine does not count
    with World(hosts) as world:
        for summed, spread in world.run(body, 600.0):
            assert summed == [2 * index + 12 for index in range(len(PLACES))]
            assert spread == [100 + index for index in range(len(PLACES))]
    assert time.process_time() - began < 60.0
