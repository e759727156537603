# Many ranks: every collective among 64 of them, on one host, on eight, and on hosts of different sizes.
# Touches the engines, as threads of this process, and how many descriptors it may have.
"""Cases that need many ranks: full masks of 64 bits, hosts that join in several rounds, hosts of one rank together
with hosts of fifteen."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from world import ENGINES, World, add_groups, allreduce, barrier, do

from farandole.engine.interface import Engine, Kind, Request

pytestmark = [pytest.mark.skipif("native" not in ENGINES, reason="the native library is not built")]
RANKS = 64
DESCRIPTORS = 3 * RANKS * RANKS
PLACES = {
    "one host": [0] * RANKS,
    "eight hosts": [rank // 8 for rank in range(RANKS)],
    "hosts of 1 to 15 ranks": [int(rank**0.5) for rank in range(RANKS)],
}


@pytest.fixture
def descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < DESCRIPTORS:
        pytest.skip(f"{RANKS} ranks in one process need {DESCRIPTORS} file descriptors; this machine allows {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, DESCRIPTORS), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def body(engine: Engine, rank: int) -> None:
    everyone = np.arange(RANKS, dtype=np.int64)
    [odd] = add_groups(engine, range(1, RANKS, 2))
    for turn in range(3):  # negotiated, learnt, by plan
        for count in (1, 1000, 100_003):
            found: Any = allreduce(engine, np.arange(count) + rank, f"sum {count}")
            assert np.array_equal(found, np.arange(count) * RANKS + everyone.sum()), (turn, count)
        found = do(engine, Request(Kind.BROADCAST, "root", np.full(5, rank), np.empty(5, np.int64), peer=63)).output
        assert (found == 63).all()
        found = do(engine, Request(Kind.ALLGATHER, "rows", np.full(rank % 3, rank))).output
        assert np.array_equal(found, np.repeat(everyone, everyone % 3))
        blocks = np.full(RANKS, rank) + 100 * everyone
        found = do(engine, Request(Kind.ALLTOALL, "blocks", blocks)).output
        assert np.array_equal(found, everyone + 100 * rank)
        parts = np.repeat(everyone, 3) + rank
        found = do(engine, Request(Kind.REDUCESCATTER, "parts", parts, np.empty(3, np.int64))).output
        assert (found == RANKS * rank + everyone.sum()).all()
        if rank % 2:
            assert (allreduce(engine, np.full(7, rank), "odd", group=odd) == everyone[1::2].sum()).all()
        barrier(engine)


@pytest.mark.parametrize("places", PLACES)
def test_every_collective_among_sixty_four(places: str, descriptors: None) -> None:
    with World(PLACES[places], tcp_streams=1) as world:
        world.run(body, 60.0)
