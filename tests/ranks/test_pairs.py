# Send and receive, and how the calls of two ranks are matched: types, tags, names, counts after a join, two threads.
# Touches the native engine through World, and the public operations.
"""A call that is matched with a wrong one gets an error; a call that is matched with the right one gets its bytes."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from world import ENGINES, World, allreduce, do

import farandole
from farandole.base import errors
from farandole.engine.interface import Engine, Kind, Request

LINKS = {"shm": [0, 0], "tcp": [0, 1]}


@pytest.mark.parametrize("links", LINKS)
def test_a_receive_of_another_type_is_refused(links: str) -> None:
    def body(engine_: Engine, rank: int) -> None:
        if rank == 0:
            do(engine_, Request(Kind.SEND, None, np.ones(100), peer=1))
        else:
            with pytest.raises(errors.Mismatch, match=r"float64.*int64"):
                do(engine_, Request(Kind.RECEIVE, None, None, np.zeros(100, np.int64), peer=0))
        assert (allreduce(engine_, np.ones(3)) == 2).all()

    with World(LINKS[links]) as world:
        world.run(body)


@pytest.mark.parametrize("links", LINKS)
@pytest.mark.parametrize("engine", ENGINES)
def test_tags_have_64_bits(engine: str, links: str) -> None:
    def body(engine_: Engine, rank: int) -> None:
        tags = [1 << 32, 0, (1 << 62) + 1, 1]
        if rank == 0:
            sends = [Request(Kind.SEND, None, np.full(5, float(tag % 97)), peer=1, tag=tag) for tag in tags]
            for handle in engine_.submit(sends):
                engine_.wait(handle, 10.0)
        else:
            for tag in reversed(tags):
                output = np.zeros(5)
                do(engine_, Request(Kind.RECEIVE, None, None, output, peer=0, tag=tag))
                assert (output == tag % 97).all()

    with World(LINKS[links], engine) as world:
        world.run(body)


def test_a_name_has_a_length_that_fits_a_frame() -> None:
    def body(engine_: Engine, rank: int) -> None:
        with pytest.raises(ValueError, match="can have 4096 bytes"):
            engine_.submit([Request(Kind.ALLREDUCE, "n" * 4097, np.ones(3), np.ones(3))])
        assert (allreduce(engine_, np.ones(3), "n" * 4096) == 2).all()
        many = [Request(Kind.ALLREDUCE, f"{i}" + "n" * 4000, np.ones(3), np.ones(3)) for i in range(3000)]
        for handle in engine_.submit(many, bundle=True):
            engine_.wait(handle, 30.0)
        assert all((one.output == 2).all() for one in many if one.output is not None)

    with World([0, 1]) as world:
        world.run(body)


@pytest.mark.parametrize("links", LINKS)
def test_unnamed_operations_meet_after_an_uneven_join(links: str) -> None:
    def body(engine_: Engine, rank: int) -> None:
        for _ in range(3):
            for _ in range(2 + 3 * rank):
                allreduce(engine_, np.ones(3))
            do(engine_, Request(Kind.JOIN))
            assert (allreduce(engine_, np.ones(3)) == 2).all()

    with World(LINKS[links]) as world:
        world.run(body)


def test_every_thread_that_waits_for_a_handle_gets_its_result() -> None:
    farandole.init()
    try:
        for _ in range(50):
            handle = farandole.grouped_allreduce_async([np.ones(3), np.ones(4)], op=farandole.Sum)
            world = farandole.world.runtime.runtime.world
            pending = world.handles[handle]
            results: list[Any] = []

            def wait(held: Any = pending, into: list[Any] = results) -> None:
                into.append(farandole.operations.pending._finish(farandole.world.runtime.runtime.world, held, 10.0))

            threads = [threading.Thread(target=wait) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert [[part.tolist() for part in result] for result in results] == [[[1.0] * 3, [1.0] * 4]] * 3
            farandole.synchronize(handle)
    finally:
        farandole.shutdown()
