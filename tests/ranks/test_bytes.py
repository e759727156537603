# Compares the costs in docs/algorithms.md with the byte counters of each rank.
# Touches the native engine through World.
"""Bytes that a rank sends over TCP for one collective; headers and negotiation are the tolerance."""

from __future__ import annotations

from math import ceil, log2
from typing import Any

import numpy as np
import pytest
from world import ENGINES, World, barrier, do

from farandole.engine.interface import Engine, Kind, Request

BYTES = 8 * 9 * 5 * 7 * 64 * 8  # every number of members below divides it
TOLERANCE = 8 << 10

pytestmark = pytest.mark.skipif("native" not in ENGINES, reason="the native library is not built")


def sent(hosts: list[int], kind: Kind, count: int = BYTES, **settings: Any) -> list[int]:
    """What each rank sends for one collective of `count` bytes: the second of two, so that links and plans exist."""

    def body(engine: Engine, rank: int) -> int:
        before = 0
        for turn in range(2):
            barrier(engine)
            before = engine.counter("bytes_sent")
            array = np.zeros(count, np.uint8)
            output = None if kind in (Kind.ALLGATHER, Kind.ALLTOALL) else np.empty_like(array)
            if kind == Kind.REDUCESCATTER:
                output = np.empty(count // len(hosts), np.uint8)
            do(engine, Request(kind, f"t{turn}", array, output, peer=0 if kind == Kind.BROADCAST else -1))
        barrier(engine)  # counters are published from time to time; after this barrier they include everything
        return engine.counter("bytes_sent") - before

    with World(hosts, **settings) as world:
        return world.run(body)


def close(found: list[int], expected: list[float]) -> bool:
    return all(want <= have <= want + TOLERANCE for have, want in zip(found, expected, strict=True))


def subtree(member: int, size: int) -> tuple[int, int]:
    """(members, children) of a place in the binomial tree: its lowest set bit is how far it reaches."""
    reach = member & -member if member else 1 << ceil(log2(size))
    children = sum(member + (1 << bit) < size for bit in range(reach.bit_length() - 1))
    return min(reach, size - member), children


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_allreduce_between_hosts(size: int) -> None:
    hosts = list(range(size))
    least = 2 * (size - 1) / size * BYTES
    up_and_down = []
    for member in hosts:
        members, children = subtree(member, size)
        up_and_down.append(float((members * (member > 0) + children) * BYTES))
    expected = {
        "ring": [least] * size,
        "direct": [least] * size,
        "doubling": [float((size - 1) * BYTES)] * size,
        "tree": up_and_down,
    }
    for algorithm, costs in expected.items():
        found = sent(hosts, Kind.ALLREDUCE, allreduce_algorithm=algorithm)
        assert close(found, costs), (algorithm, found, costs)


@pytest.mark.parametrize("algorithm", ["ring", "direct"])
def test_allreduce_of_slices_in_parallel(algorithm: str) -> None:
    """Two ranks on each of three hosts: each carries half of the bytes."""
    found = sent([0, 0, 1, 1, 2, 2], Kind.ALLREDUCE, allreduce_algorithm=algorithm)
    assert close(found, [2 * 2 / 3 * BYTES / 2] * 6), found


@pytest.mark.parametrize("hosts", [[0, 1, 2], [0, 0, 1, 1]], ids=str)
def test_bytes_of_the_other_collectives(hosts: list[int]) -> None:
    size, count = len(hosts), max(hosts) + 1
    abroad = sum(host != hosts[0] for host in hosts)  # members on other hosts, the same for all
    expected = {
        Kind.ALLGATHER: [float((count - 1) * BYTES)] * size,
        Kind.ALLTOALL: [abroad / size * BYTES] * size,
        # Each member reduces, on its host, the data for one member of every other host.
        Kind.REDUCESCATTER: [(count - 1) / size * BYTES] * size,
        Kind.BROADCAST: [float(subtree(0, count)[1] * BYTES) if rank == 0 else 0.0 for rank in range(size)],
    }
    for kind, costs in expected.items():
        found = sent(hosts, kind)
        assert close(found, costs), (kind.name, found, costs)


def test_ranks_of_one_host_send_only_negotiation_messages() -> None:
    for kind in (Kind.ALLREDUCE, Kind.ALLGATHER, Kind.BROADCAST, Kind.ALLTOALL, Kind.REDUCESCATTER):
        assert close(sent([0] * 4, kind), [0.0] * 4), kind.name


def test_the_selector_beyond_32_hosts() -> None:
    """The costs tell which algorithm ran: doubling for little, tree for some, ring for much."""
    hosts = list(range(34))
    small, some, much = 34 * 64, 34 * 1024, 34 * 32768
    assert close(sent(hosts, Kind.ALLREDUCE, small), [33.0 * small] * 34)
    found = sent(hosts, Kind.ALLREDUCE, some)
    assert found[33] < some + TOLERANCE < 5 * some < found[0], found  # a leaf, and the first
    assert close(sent(hosts, Kind.ALLREDUCE, much), [2 * 33 / 34 * much] * 34)
