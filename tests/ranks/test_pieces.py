# One tensor in several pieces of memory, and results whose memory is used again. Ranks as threads.
# Touches the native engine through World.
"""The place in memory must not matter: results are compared, bit for bit, with those of the same data in one piece."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from world import ENGINES, World, do

from farandole.engine.interface import DType, Engine, Kind, ReduceOp, Request, Span

pytestmark = pytest.mark.skipif("native" not in ENGINES, reason="the native library is not built")
SIZES = [1, 64, 3, 5000, 17, 40_000, 1, 250_000]  # more than a slot, odd, single elements


def scattered(parts: list[np.ndarray], request: Request) -> Request:
    """The request on these arrays; between them is memory that does not belong to them."""
    count = sum(part.size for part in parts)
    pieces = np.array([[part.ctypes.data, part.nbytes] for part in parts], np.int64)
    memory = Span(0, (count,), parts, parts)
    return replace(request, input=memory, output=memory, pieces=pieces, dtype=DType.FLOAT32)


@pytest.mark.parametrize("sizes", [[3, 2], SIZES], ids=["one hop", "slices"])
@pytest.mark.parametrize("hosts", [[0, 0], [0, 0, 0], [0, 0, 1]], ids=str)
def test_a_tensor_in_pieces_is_summed_as_if_it_were_whole(hosts: list[int], sizes: list[int]) -> None:
    random = np.random.default_rng(3)
    values = random.standard_normal((len(hosts), sum(sizes))).astype(np.float32)

    def body(engine: Engine, rank: int) -> tuple[np.ndarray, np.ndarray]:
        whole = values[rank].copy()
        do(engine, Request(Kind.ALLREDUCE, "whole", whole, whole, op=ReduceOp.AVERAGE))
        parts = [part.copy() for part in np.split(values[rank], np.cumsum(sizes)[:-1])]
        request = Request(Kind.ALLREDUCE, "parts", op=ReduceOp.AVERAGE)
        if rank == 0:  # the other ranks do not need this
            parts = [values[rank].copy()]
        do(engine, scattered(parts, request))
        return whole, np.concatenate(parts)

    with World(hosts) as world:
        for whole, parts in world.run(body):
            assert whole.tobytes() == parts.tobytes()
            assert np.allclose(whole, values.mean(axis=0), atol=1e-6)


def test_pieces_that_do_not_fit_are_refused_and_the_job_goes_on() -> None:
    part = np.ones(4, np.float32)
    good = scattered([part], Request(Kind.ALLREDUCE, "x"))

    def body(engine: Engine, _: int) -> Any:
        for bad, message in [
            (replace(good, pieces=np.array([[part.ctypes.data, 8]])), "the pieces have 8 bytes, the tensor 16"),
            (replace(good, pieces=np.array([[0, 16]])), "needs an address"),
            (replace(good, kind=Kind.BROADCAST, peer=0), "only an allreduce"),
        ]:
            with pytest.raises(ValueError, match=message):
                engine.submit([bad])
        return do(engine, good)

    with World([0]) as world:
        world.run(body)
    assert part.tolist() == [1, 1, 1, 1]


def test_results_in_reused_memory_are_correct_and_not_shared() -> None:
    count = 1 << 19  # 2 MiB from each

    def body(engine: Engine, rank: int) -> list[bool]:
        found = []
        held: list[np.ndarray] = []
        for step in range(6):
            outcome = do(engine, Request(Kind.ALLGATHER, "g", np.full(count, 10 * step + rank, np.int32)))
            found.append(bool((outcome.output.reshape(2, -1) == [[10 * step], [10 * step + 1]]).all()))
            held = [*held[-1:], outcome.output]  # the last two are in use, older memory comes back
            for age, one in enumerate(reversed(held)):
                found.append(int(one[0]) == 10 * (step - age))
        return found

    with World([0, 0]) as world:
        for found in world.run(body):
            assert len(found) == 17 and all(found)
