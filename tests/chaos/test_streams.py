# Faulty streams: flipped bits, early ends, one byte at a time. There must be no wrong sum and no hang.
# Touches the test-only library through World.
"""Each test checks that its fault occurred. Then every rank must have an error, or every result must be right."""

from __future__ import annotations

import contextlib
import os
import random
import selectors
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from world import CHAOS_LIBRARY, LIBRARY, World, allreduce, barrier, tcp_pair
from world import TCP as TCP_LINK

from farandole.base import errors
from farandole.engine.interface import Engine, Kind, Request

FAULTS = 12 * int(os.environ.get("CHAOS_N", "1"))
COLLECTIVES = 100_000 * int(os.environ["CHAOS_N"]) if "CHAOS_N" in os.environ else 1000
TCP = [0, 1, 2]

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(not (LIBRARY or CHAOS_LIBRARY.exists()), reason="the library with failpoints is not built"),
]


def world_with_failpoints(hosts: list[int]) -> World:
    return World(hosts, library=LIBRARY or str(CHAOS_LIBRARY))


def sum_until_it_fails(engine: Engine, rank: int) -> int:
    """Runs sums until there is an error. A wrong sum raises AssertionError."""
    for turn in range(2000):
        elements = [3, 5000, 100_000][turn % 3]
        try:
            total = allreduce(engine, np.full(elements, float(turn + rank)), f"t{turn % 7}")
        except errors.PeerLost:
            return turn
        assert (total == 3 * turn + 3).all(), (turn, total[total != 3 * turn + 3][:3])
    raise AssertionError("the fault had no effect")


@pytest.mark.parametrize("action", ["corrupt", "truncate"])
def test_rows_15_and_16_a_damaged_stream_ends_the_job_and_never_a_wrong_sum(action: str) -> None:
    for number in range(FAULTS):
        with world_with_failpoints(TCP) as world:
            victim = world.engines[number % world.size]
            world.run(lambda engine, rank: barrier(engine))
            victim.chaos_set(f"stream.{action}", "off")  # type: ignore[attr-defined]  # of an earlier engine at the same address
            victim.chaos_set(f"stream.{action}", action, 7 * number)  # type: ignore[attr-defined]
            world.run(sum_until_it_fails)
            assert victim.chaos_fired(f"stream.{action}") == 1  # type: ignore[attr-defined]


class Flipper:
    """Forwards the bytes of all links, and flips one bit after `left` bits."""

    def __init__(self) -> None:
        self.left = 1 << 62  # until the links exist
        self.fired = 0
        self._selector = selectors.DefaultSelector()
        self._ends: dict[socket.socket, socket.socket] = {}
        self._thread = threading.Thread(target=self._carry, name="Thread-pytest-flipper", daemon=True)

    def between(self, one: socket.socket, other: socket.socket) -> None:
        for end, opposite in ((one, other), (other, one)):
            self._ends[end] = opposite
            self._selector.register(end, selectors.EVENT_READ)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()
        self._selector.close()

    def _carry(self) -> None:
        while self._ends:
            for key, _ in self._selector.select():
                end: Any = key.fileobj
                data = b""
                with contextlib.suppress(OSError):
                    data = end.recv(1 << 16)
                with contextlib.suppress(OSError):
                    if data:
                        self._ends[end].sendall(self._flipped(data))
                        continue
                    self._ends[end].shutdown(socket.SHUT_WR)
                self._forget(end)

    def _flipped(self, data: bytes) -> bytes:
        before, self.left = self.left, self.left - 8 * len(data)
        if self.fired or self.left >= 0:
            return data
        self.fired = 1
        changed = bytearray(data)
        changed[before // 8] ^= 1 << before % 8
        return bytes(changed)

    def _forget(self, end: socket.socket) -> None:
        """One direction has ended; the sockets are closed when both have."""
        self._selector.unregister(end)
        opposite = self._ends.pop(end)
        if opposite not in self._ends:
            end.close()
            opposite.close()


@contextlib.contextmanager
def flipping(bits: int) -> Iterator[tuple[World, Flipper]]:
    """Three hosts. All data between them goes through a Flipper."""
    flipper = Flipper()

    class FlippingWorld(World):
        def link(self, one: int, two: int) -> None:
            for _ in range(self.streams):
                first, second = tcp_pair(), tcp_pair()
                self.engines[one].add_link(two, first[0].detach(), TCP_LINK)
                self.engines[two].add_link(one, second[0].detach(), TCP_LINK)
                flipper.between(first[1], second[1])

        def run(self, *words: Any) -> Any:
            if not flipper._thread.is_alive():
                flipper.start()
            return super().run(*words)

    with FlippingWorld(TCP) as world:
        flipper.left = bits
        yield world, flipper
    flipper.join()


def sums_of_any_size(engine: Engine, rank: int) -> int:
    """The number of right sums before an error."""
    for turn in range(100_000):
        try:
            total = allreduce(engine, np.full([3, 40, 300][turn % 3], float(turn + rank)), f"t{turn % 7}")
        except errors.PeerLost:
            return turn
        assert (total == 3 * turn + 3).all(), (turn, total[total != 3 * turn + 3][:3])
    raise AssertionError("the flipped bit caused no error")


@pytest.mark.timeout(60 + COLLECTIVES // 50)
def test_row_15_one_bit_in_a_million_never_gives_a_wrong_sum() -> None:
    """The flipped bit may be in headers or payloads: the ranks get an error or the right sum. A hundred thousand sums
    with `make chaos`."""
    seed = int(os.environ.get("CHAOS_SEED", "15"))
    draw, done, worlds = random.Random(seed), 0, 0
    while done < COLLECTIVES:
        with flipping(int(draw.expovariate(1e-6))) as (world, flipper):
            turns = world.run(sums_of_any_size)
            assert flipper.fired == 1, f"seed {seed}, world {worlds}: the ranks failed by themselves"
        done += min(turns)
        worlds += 1
    print(f"seed {seed}: {done} sums right, {worlds} of {worlds} flipped bits noticed")


@pytest.mark.parametrize("hosts", [[0, 1, 2], [0, 0, 1]], ids=["tcp", "both"])
def test_row_16_streams_that_move_few_bytes_at_a_time_are_slow_and_right(hosts: list[int]) -> None:
    def body(engine: Engine, rank: int) -> int:
        engine.chaos_set("stream.short", "short")  # type: ignore[attr-defined]
        for turn in range(5):
            total = allreduce(engine, np.full(2000, float(rank + turn)), "t")
            assert (total == 3 + 3 * turn).all()
        return int(engine.chaos_fired("stream.short"))  # type: ignore[attr-defined]

    with world_with_failpoints(hosts) as world:
        assert sum(world.run(body)) > 0


@pytest.mark.parametrize("kind", [Kind.ALLREDUCE, Kind.SEND])
def test_an_operation_that_fails_in_the_engine_ends_all_pending_operations(kind: Kind) -> None:
    """If the engine throws while it accepts requests, all of them end, also those that it has not accepted yet."""

    def body(engine: Engine, rank: int) -> None:
        if rank != 0:
            with pytest.raises(errors.HorovodInternalError):
                allreduce(engine, np.ones(3), "last")
            return
        point = f"{kind.name.lower()}.enqueue"
        engine.chaos_set(point, "off")  # type: ignore[attr-defined]
        engine.chaos_set(point, "error")  # type: ignore[attr-defined]
        arrays = [np.ones(3) for _ in range(5)]
        if kind == Kind.SEND:
            requests = [Request(kind, None, array, peer=1, tag=number) for number, array in enumerate(arrays)]
        else:
            requests = [Request(kind, f"n{number}", array, array) for number, array in enumerate(arrays)]
        for handle in engine.submit(requests):
            with pytest.raises(errors.HorovodInternalError, match="failpoint"):
                engine.wait(handle, 20.0)
        assert engine.chaos_fired(point) == 1  # type: ignore[attr-defined]

    with world_with_failpoints([0, 0]) as world:
        world.run(body)


def test_a_receive_from_any_source_ends_when_its_source_has_failed() -> None:
    def body(engine: Engine, rank: int) -> None:
        if rank != 0:
            handles = engine.submit([Request(Kind.SEND, None, np.ones(3), peer=0, tag=tag) for tag in (1, 2)])
            for handle in handles:
                with contextlib.suppress(errors.HorovodInternalError):
                    engine.wait(handle, 20.0)
            return
        engine.chaos_set("receive.enqueue", "off")  # type: ignore[attr-defined]
        engine.chaos_set("receive.enqueue", "error")  # type: ignore[attr-defined]
        requests = [Request(Kind.RECEIVE, None, None, np.zeros(3), peer=-1, tag=tag) for tag in (1, 2)]
        for handle in engine.submit(requests):
            with pytest.raises(errors.HorovodInternalError, match="failpoint"):
                engine.wait(handle, 20.0)
        assert engine.chaos_fired("receive.enqueue") == 1  # type: ignore[attr-defined]

    with world_with_failpoints([0, 0]) as world:
        world.run(body)
