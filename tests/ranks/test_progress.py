# No stalls: groups in cyclic orders, pipelines with reductions, steps that differ from their plan. All end soon.
# Touches both engines through World.
"""Operations that must not wait for each other: overlapping groups, send and receive, plans that no longer fit."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from waiting import Moment, in_time, repeated, until
from world import ENGINES, World, add_groups, allreduce, barrier

from farandole.engine.interface import Array, Engine, Kind, ReduceOp, Request

ROUNDS = 1000 * int(os.environ.get("CHAOS_N", "1"))
SOON_S = 0.050
TRIES = 3  # the machine is shared: one pause by the scheduler is not a stall, three in a row are
LINKS = {"shm": [0, 0, 0], "tcp": [0, 1, 2], "both": [0, 0, 1]}


def rounds_for(engine: str) -> int:
    return ROUNDS if engine == "native" else 100  # the reference is slow; a cycle would stop it in the first rounds


def begin_sum(engine: Engine, value: float, name: str | None, group: int = 0, count: int = 3) -> tuple[int, Array]:
    output = np.zeros(count)
    return engine.submit([Request(Kind.ALLREDUCE, name, np.full(count, float(value)), output, group=group)])[0], output


@pytest.mark.parametrize("links", LINKS)
@pytest.mark.parametrize("engine", ENGINES)
def test_three_overlapping_pairs_in_cyclic_orders(engine: str, links: str) -> None:
    pairs = [(0, 1), (1, 2), (0, 2)]

    def body(engine_: Engine, rank: int) -> None:
        numbers = add_groups(engine_, *pairs)
        chance = random.Random(rank)
        for turn in range(rounds_for(engine)):
            # Rank 0 begins with {0, 1}, rank 1 with {1, 2}, rank 2 with {0, 2}: each waits for the next.
            own_pairs = [index for index in (rank, (rank + 1) % 3, (rank + 2) % 3) if rank in pairs[index]]
            if turn % 2:
                chance.shuffle(own_pairs)
            named = "pair" if turn % 3 else None
            begun = [begin_sum(engine_, turn + rank, named, numbers[index]) for index in own_pairs]
            for index, (handle, output) in zip(own_pairs, begun, strict=True):
                engine_.wait(handle, 10.0)
                assert output[0] == 2 * turn + sum(pairs[index])

    with World(LINKS[links], engine) as world:
        world.run(body, 100.0)


@pytest.mark.parametrize("links", LINKS)
@pytest.mark.parametrize("engine", ENGINES)
def test_pipeline_of_sends_during_reductions(engine: str, links: str) -> None:
    """1F1B: activations go up the ranks, gradients down, reductions run in between, in random orders."""
    batches = 3

    def requests(rank: int, size: int, turn: int) -> list[tuple[Request, float]]:
        """What this rank does in one round, and the value that must arrive (nan: none does)."""
        work = []
        for batch in range(batches):
            for towards, tag in ((1, 2 * batch), (-1, 2 * batch + 1)):
                value = np.full(5 + 20_000 * (turn % 50 == 0), 1000.0 * turn + tag)
                if 0 <= rank + towards < size:
                    work.append((Request(Kind.SEND, None, value, peer=rank + towards, tag=tag), np.nan))
                if 0 <= rank - towards < size:
                    output = np.zeros_like(value)
                    work.append((Request(Kind.RECEIVE, None, None, output, peer=rank - towards, tag=tag), value[0]))
        for name in ("w", "b"):
            ones = np.full(100, float(turn))
            work.append((Request(Kind.ALLREDUCE, name, ones, np.zeros(100)), float(turn * size)))
        return work

    def body(engine_: Engine, rank: int) -> None:
        chance = random.Random(rank)
        for turn in range(rounds_for(engine)):
            work = requests(rank, engine_.size, turn)
            chance.shuffle(work)
            handles = [engine_.submit([request])[0] for request, _ in work]
            order = list(range(len(work)))
            chance.shuffle(order)
            for index in order:
                engine_.wait(handles[index], 10.0)
                request, expected = work[index]
                if request.output is not None:
                    assert (request.output == expected).all(), (turn, request)

    with World(LINKS[links], engine) as world:
        world.run(body, 100.0)


# --- Steps that differ from their plan -------------------------------------------------------------------------------

PLAN = ["a", "b", "c", "d"]


class Clock:
    """The longest time of any rank, and a barrier for the ranks that is not a collective."""

    def __init__(self, size: int) -> None:
        self.meeting = threading.Barrier(size, timeout=30.0)
        self.took = [0.0] * size

    def measure(self, rank: int, work: Callable[[], None]) -> None:
        self.meeting.wait()
        began = time.monotonic()
        work()
        self.took[rank] = time.monotonic() - began


def teach(engine: Engine, names: list[str], steps: int = 4) -> None:
    """The same step again and again: from the third on it is planned."""
    for _ in range(steps):
        handles = [begin_sum(engine, 1.0, name)[0] for name in names]
        for handle in handles:
            engine.wait(handle, 10.0)


def soon(attempt: Callable[[], float], what: object) -> None:
    """At least one of a few attempts is quick; the others are counted as repeated tries."""
    for number in range(TRIES):
        before = Moment.now()
        if (took := attempt()) < SOON_S:
            return
        line = f"{what}: try {number + 1} took {took:.3f} s, longer than {SOON_S} s; {before.since()}"
        print(line, flush=True)
        repeated.append(line)
    in_time(took, SOON_S, str(what))


def look_until(done: Callable[[], bool]) -> None:
    until(done, 5.0, every=0.0005)


def end_by_waiting(engine: Engine, begun: list[tuple[int, Array]]) -> None:
    for handle, _ in begun:
        engine.wait(handle, 5.0)


def end_by_waiting_for_another(engine: Engine, begun: list[tuple[int, Array]]) -> None:
    engine.wait(begin_sum(engine, 1.0, "another")[0], 5.0)
    end_by_watching(engine, begun)


def end_by_polling(engine: Engine, begun: list[tuple[int, Array]]) -> None:
    for handle, _ in begun:
        look_until(lambda handle=handle: engine.poll(handle))  # type: ignore[misc]


def end_by_watching(engine: Engine, begun: list[tuple[int, Array]]) -> None:
    """No rank waits or polls: the test only reads the memory."""
    for _, output in begun:
        look_until(lambda output=output: bool((output == engine.size).all()))  # type: ignore[misc]


WAYS = {
    "wait": end_by_waiting,
    "another": end_by_waiting_for_another,
    "poll": end_by_polling,
    "nobody": end_by_watching,
}
SUBSETS = [list(part) for count in (1, 2, 3) for part in itertools.combinations(PLAN, count)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("who", ["all", "first", "last"])
@pytest.mark.parametrize("links", LINKS)
def test_a_step_that_is_a_subset_of_the_last_one(links: str, who: str, way: str) -> None:
    """Ranks of `few` submit a part of the known step, the others all of it; what all have submitted ends soon."""
    size = len(LINKS[links])
    few = {"all": set(range(size)), "first": {0}, "last": {size - 1}}[who]
    with World(LINKS[links], ENGINES[0], fusion_threshold=64) as world:  # two of the tensors make a bucket

        def attempt(subset: list[str]) -> float:
            clock = Clock(size)

            def body(engine: Engine, rank: int) -> None:
                teach(engine, PLAN)
                own_pairs = subset if rank in few else PLAN
                begun: dict[str, tuple[int, Array]] = {}

                def step() -> None:
                    begun.update({name: begin_sum(engine, 1.0, name) for name in own_pairs})
                    WAYS[way](engine, [begun[name] for name in subset])

                clock.measure(rank, step)
                clock.meeting.wait()
                if who != "all":
                    begun.update({name: begin_sum(engine, 1.0, name) for name in PLAN if name not in begun})
                for handle, output in begun.values():
                    engine.wait(handle, 5.0)
                    assert (output == size).all()

            world.run(lambda engine, rank: body(Once(engine), rank))  # type: ignore[arg-type]
            return max(clock.took)

        for subset in SUBSETS:
            soon(lambda subset=subset: attempt(subset), (links, who, way, subset))  # type: ignore[misc]


class Once:
    """An engine whose handles may be waited for twice: the second time there is nothing left to do."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.done: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def wait(self, handle: int, timeout: float) -> None:
        if handle not in self.done:
            self.engine.wait(handle, timeout)
            self.done.add(handle)


@pytest.mark.parametrize("fused", [True, False], ids=["one-bucket", "many-buckets"])
@pytest.mark.parametrize("links", LINKS)
def test_join_at_every_position_of_a_known_plan(links: str, fused: bool) -> None:
    """One rank submits the first k tensors of the step and joins; the others do the whole step, and join after it."""
    size = len(LINKS[links])
    with World(LINKS[links], ENGINES[0], fusion_threshold=(1 << 20) if fused else 0) as world:

        def attempt(leaver: int, position: int) -> float:
            clock = Clock(size)

            def body(engine: Engine, rank: int) -> None:
                teach(engine, PLAN)
                own_pairs = PLAN[:position] if rank == leaver else PLAN
                begun: dict[str, tuple[int, Array]] = {}

                def step() -> None:
                    begun.update({name: begin_sum(engine, 1.0, name) for name in own_pairs})
                    join = engine.submit([Request(Kind.JOIN)])[0] if rank == leaver else None
                    for handle, _ in begun.values():
                        engine.wait(handle, 5.0)
                    if join is None:
                        join = engine.submit([Request(Kind.JOIN)])[0]
                    last = engine.wait(join, 5.0).value
                    assert last != leaver or position == len(PLAN)  # only then the others need nothing from its join

                clock.measure(rank, step)
                for index, name in enumerate(PLAN):
                    if name in begun:
                        assert (begun[name][1] == (size if index < position else size - 1)).all(), (name, begun[name])

            world.run(body)
            return max(clock.took)

        for leaver, position in itertools.product(range(size), range(len(PLAN) + 1)):
            soon(lambda at=(leaver, position): attempt(*at), (links, leaver, position))  # type: ignore[misc]


# --- Join in general -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_join_returns_the_last_rank_and_averages_over_all_ranks(engine: str) -> None:
    def body(engine_: Engine, rank: int) -> tuple[list[float], int]:
        sums = [float(allreduce(engine_, [3.0], f"s{i}", op=ReduceOp.AVERAGE)[0]) for i in range(rank + 1)]
        last = engine_.wait(engine_.submit([Request(Kind.JOIN)])[0], 10.0).value
        return sums, last

    with World([0, 0, 1], engine) as world:
        for _ in range(3):  # it can be done again and again
            results = world.run(body)
            assert [sums for sums, _ in results] == [[3.0], [3.0, 2.0], [3.0, 2.0, 1.0]]
            assert [last for _, last in results] == [2, 2, 2]
        world.run(lambda engine_, rank: barrier(engine_))
