# Bad input and mismatches: every rank that takes part gets the documented error, and the next operation works.
# Touches both engines through World.
"""Errors as a table: what the ranks submit, which error all of them get."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import numpy as np
import pytest
from waiting import in_time, until
from world import ENGINES, World, add_groups, allreduce, barrier, do

from farandole.base import errors
from farandole.engine.interface import Engine, Kind, ReduceOp, Request
from farandole.engine.reference import ReferenceEngine

LINKS = {"shm": [0, 0, 0], "both": [0, 1, 1]}
ONES = np.ones(4, np.float32)


def request(kind: Kind = Kind.ALLREDUCE, data: Any = ONES, **more: Any) -> Request:
    array = np.array(data)
    output = None if kind in (Kind.ALLGATHER, Kind.ALLTOALL) else np.empty_like(array)
    if kind == Kind.REDUCESCATTER:
        output = np.empty_like(array[: len(array)])
    return Request(kind, "t", array, output, **more)


DISAGREEMENTS = {
    "dtype": (request(), request(data=ONES.astype(np.float64)), "Mismatched data types"),
    "kind": (request(), request(Kind.ALLGATHER), "Mismatched operations"),
    "shape": (request(), request(data=np.ones(5, np.float32)), "Mismatched ALLREDUCE tensor shapes"),
    "dimensions": (request(), request(data=np.ones((2, 2), np.float32)), "Mismatched ALLREDUCE tensor shapes"),
    "op": (request(), request(op=ReduceOp.MAX), "Mismatched reduction operation"),
    "prescale": (request(), request(prescale=0.5), "Mismatched prescale"),
    "postscale": (request(), request(postscale=0.5), "Mismatched prescale and/or postscale"),
    "root": (request(Kind.BROADCAST, peer=0), request(Kind.BROADCAST, peer=1), "Mismatched BROADCAST root ranks"),
    "device": (request(), request(device=0), "Mismatched ALLREDUCE CPU/GPU device selection"),
    "gathered rows": (
        request(Kind.ALLGATHER, np.ones((2, 3))),
        request(Kind.ALLGATHER, np.ones((2, 4))),
        "Mismatched ALLGATHER tensor shapes",
    ),
    "exchanged rows": (
        request(Kind.ALLTOALL, np.ones((3, 3))),
        request(Kind.ALLTOALL, np.ones((3, 3, 1))),
        "Mismatched ALLTOALL tensor shapes",
    ),
    "one scalar": (request(Kind.ALLGATHER), request(Kind.ALLGATHER, np.float32(1.0)), ""),
    "scattered rows": (
        request(Kind.REDUCESCATTER, np.ones((3, 3))),
        request(Kind.REDUCESCATTER, np.ones((3, 2))),
        "Mismatched REDUCESCATTER tensor shapes",
    ),
}


@pytest.mark.parametrize("links", LINKS)
@pytest.mark.parametrize("engine", ENGINES)
def test_row_9_disagreement_is_an_error_on_all_ranks_and_the_job_goes_on(engine: str, links: str) -> None:
    with World(LINKS[links], engine) as world:
        for what, (one, two, message) in DISAGREEMENTS.items():
            for odd in range(world.size):
                found = world.attempt(lambda engine_, rank: do(engine_, two if rank == odd else one))  # noqa: B023
                assert [type(error) for error in found] == [errors.Mismatch] * world.size, (what, odd, found)
                assert all(str(error).startswith(message) for error in found), (what, odd, found)
                assert world.run(lambda engine_, rank: allreduce(engine_, [1.0], "t"))[0] == [world.size]


UNANIMOUS = {
    "gathered scalar": (request(Kind.ALLGATHER, 1.0), errors.Mismatch, "Process-set rank zero tried to"),
    "exchanged scalar": (request(Kind.ALLTOALL, 1.0), errors.Mismatch, "Process-set rank zero tried to"),
    "scattered minimum": (
        request(Kind.REDUCESCATTER, np.ones((3, 1)), op=ReduceOp.MIN),
        errors.HorovodInternalError,
        "Reducescatter currently only supports",
    ),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_resources_that_are_requested_and_do_not_exist(engine: str) -> None:
    with World([0, 0, 1], engine) as world:
        for what, (bad, expected, message) in UNANIMOUS.items():
            found = world.attempt(lambda engine_, rank: do(engine_, bad))  # noqa: B023
            assert all(type(error) is expected and str(error).startswith(message) for error in found), (what, found)
            assert world.run(lambda engine_, rank: allreduce(engine_, [1.0], "t"))[0] == [3]


BAD = {
    "no such type": (Request(Kind.ALLREDUCE, "t", np.ones(3, np.complex64), np.ones(3, np.complex64)), ValueError),
    "strings": (Request(Kind.ALLREDUCE, "t", np.array(["a"]), np.array(["a"])), ValueError),
    "not contiguous": (Request(Kind.ALLREDUCE, "t", np.ones((4, 4))[:, 0], np.ones(4)), ValueError),
    "not contiguous output": (Request(Kind.ALLREDUCE, "t", np.ones(4), np.ones((4, 4))[:, 0]), ValueError),
    "no input": (Request(Kind.ALLREDUCE, "t"), ValueError),
    "root beyond the job": (request(Kind.BROADCAST, peer=3), ValueError),
    "negative root": (request(Kind.BROADCAST, peer=-1), ValueError),
    "peer beyond the job": (Request(Kind.SEND, None, ONES, peer=9), ValueError),
    "negative peer": (Request(Kind.RECEIVE, None, None, ONES.copy(), peer=-2), ValueError),
    "negative split": (request(Kind.ALLTOALL, splits=[-1, 2, 2]), ValueError),
    "splits beyond the rows": (request(Kind.ALLTOALL, splits=[2, 2, 2]), ValueError),
    "huge splits": (request(Kind.ALLTOALL, splits=[2**62, 2**62, 2**62]), ValueError),
    "too few splits": (request(Kind.ALLTOALL, splits=[4]), ValueError),
    "rows not divisible": (request(Kind.ALLTOALL), ValueError),
    "unknown process set": (request(group=77), ValueError),
    "negative process set": (request(group=-1), ValueError),
    "adasum of integers": (request(data=np.ones(4, np.int32), op=ReduceOp.ADASUM), ValueError),
    "average of bool": (request(data=np.ones(4, np.bool_), op=ReduceOp.AVERAGE), ValueError),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_bad_arguments_are_refused_by_the_call_that_gets_them(engine: str) -> None:
    """Only rank 1 makes a mistake: it gets the error at once, the others notice nothing, and the job continues."""
    with World([0, 0, 1], engine) as world:
        for what, (bad, expected) in BAD.items():
            with pytest.raises(expected):
                do(world.engines[1], bad, 5.0)
                pytest.fail(f"{what} was accepted")
            assert world.run(lambda engine_, rank: allreduce(engine_, [1.0], "t"))[0] == [3], what


@pytest.mark.parametrize("engine", ENGINES)
def test_all_requests_of_a_submission_are_accepted_or_none(engine: str) -> None:
    with World([0, 0], engine) as world:
        with pytest.raises(ValueError):
            world.engines[0].submit([request(), Request(Kind.BROADCAST, "u", ONES, ONES.copy(), peer=5)])
        # Had "t" been accepted, it would be a duplicate now.
        assert world.run(lambda engine_, rank: allreduce(engine_, [1.0], "t"))[1] == [2]


@pytest.mark.parametrize("engine", ENGINES)
def test_duplicate_names(engine: str) -> None:
    with World([0, 0], engine) as world:
        first = world.engines[0].submit([request()])[0]
        with pytest.raises(ValueError, match="Requested to allreduce, allgather, or broadcast"):
            world.engines[0].submit([request()])
        with pytest.raises(ValueError, match="d"):
            world.engines[1].submit([Request(Kind.ALLREDUCE, "d", ONES, ONES.copy())] * 2)
        second = world.engines[1].submit([request()])[0]
        for engine_, handle in zip(world.engines, (first, second), strict=True):
            assert engine_.wait(handle, 5.0).output is not None
        assert world.run(lambda engine_, rank: allreduce(engine_, [1.0], "t"))[0] == [2]


@pytest.mark.parametrize("engine", ENGINES)
def test_handles_are_known_once(engine: str) -> None:
    with World([0], engine) as world:
        handle = world.engines[0].submit([request()])[0]
        world.engines[0].wait(handle, 5.0)
        for call in (world.engines[0].poll, world.engines[0].wait):
            with pytest.raises(ValueError):
                call(handle)
            with pytest.raises(ValueError):
                call(12345)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rank_outside_a_group_cannot_use_it(engine: str) -> None:
    with World([0, 0, 0], engine) as world:
        pair, other = world.run(lambda engine_, rank: add_groups(engine_, [0, 1], [1, 2]))[0]
        with pytest.raises(ValueError):
            world.engines[2].submit([request(group=pair)])
        with pytest.raises(ValueError):
            world.engines[0].submit([Request(Kind.BROADCAST, "b", ONES, ONES.copy(), group=pair, peer=2)])
        sums = world.run(lambda engine_, rank: allreduce(engine_, [1.0], "t", group=pair if rank < 2 else 0)[0]
                         if rank < 2 else 0)  # fmt: skip
        assert sums == [2, 2, 0]
        world.run(lambda engine_, rank: do(engine_, Request(Kind.REMOVE_GROUP, splits=[other])))
        with pytest.raises(ValueError):
            world.engines[1].submit([request(group=other)])
        disagree = world.attempt(lambda engine_, rank: add_groups(engine_, [0, 1 + (rank == 2)]))
        assert [type(error) for error in disagree] == [errors.Mismatch] * 3
        world.run(lambda engine_, rank: barrier(engine_))


@pytest.mark.parametrize("engine", ENGINES)
def test_operations_that_are_refused_after_a_join(engine: str) -> None:
    """Rank 2 has joined: reductions continue, all other operations are an error on the other ranks."""
    with World([0, 0, 0], engine) as world:
        joined = world.engines[2].submit([Request(Kind.JOIN)])[0]
        for kind in (Kind.ALLGATHER, Kind.BROADCAST, Kind.ALLTOALL, Kind.REDUCESCATTER):
            bad = {rank: request(kind, np.ones((3, 2)), peer=0) for rank in (0, 1)}
            found = world.attempt(lambda engine_, rank: do(engine_, bad[rank]) if rank < 2 else None)  # noqa: B023
            assert all(isinstance(error, errors.HorovodInternalError) for error in found[:2]), (kind, found)
            assert "Join" in str(found[0])
        assert not world.engines[2].poll(joined)
        rest = world.run(lambda engine_, rank: do(engine_, Request(Kind.JOIN)).value if rank < 2 else None)
        assert world.engines[2].wait(joined, 5.0).value == rest[0] and rest[0] in (0, 1)
        with pytest.raises(ValueError):
            world.engines[0].submit([Request(Kind.JOIN, group=3)])


# --- Time ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_a_wait_that_times_out_leaves_the_operation_pending(engine: str) -> None:
    with World([0, 1], engine) as world:
        handle = world.engines[0].submit([request()])[0]
        began = time.monotonic()
        with pytest.raises(errors.FarandoleTimeout, match="t"):
            world.engines[0].wait(handle, 0.05)
        took = time.monotonic() - began
        assert took >= 0.05
        in_time(took, 1.0, "a wait of 50 ms")
        assert not world.engines[0].poll(handle)
        world.engines[1].wait(world.engines[1].submit([request()])[0], 5.0)
        assert (world.engines[0].wait(handle, 5.0).output == 2 * ONES).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rank_that_stops_polling_does_not_block_the_others(engine: str) -> None:
    """The thread that waits drives the engine while it waits; afterwards the engine continues without it."""
    with World([0, 0], engine) as world:
        for _ in range(10):  # the later ones follow a plan
            [early] = world.engines[0].submit([request()], prompt=True)
            assert not world.engines[0].poll(early, 0.002)
            [late] = world.engines[1].submit([request()], prompt=True)
            assert world.engines[1].poll(late, 5.0)  # rank 0 does nothing during this time
            assert world.engines[0].poll(early, 5.0)
            for number, handle in enumerate((early, late)):
                assert (world.engines[number].wait(handle, 5.0).output == 2 * ONES).all()
        with pytest.raises(ValueError):
            world.engines[0].poll(early, 0.01)


class Listener(logging.Handler):
    """Collects the lines of the log and tells when one of them says something."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.changed = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self.changed:
            self.lines.append(record.getMessage())
            self.changed.notify_all()

    def wait_for(self, *parts: str, timeout: float = 5.0) -> str:
        with self.changed:
            found = self.changed.wait_for(
                lambda: next((line for line in self.lines if all(part in line for part in parts)), None), timeout
            )
        assert found, f"no line with {parts} in {self.lines}"
        return found


@pytest.fixture
def log() -> Any:
    listener = Listener()
    logger = logging.getLogger("farandole")
    logger.addHandler(listener)
    yield listener
    logger.removeHandler(listener)


needs_native = pytest.mark.skipif("native" not in ENGINES, reason="the native library is not built")


@needs_native
def test_row_10_stall_report_names_the_tensor_and_the_ranks(log: Listener) -> None:
    settings: dict[str, Any] = {"stall_note_seconds": 0.05, "stall_check_time_seconds": 0.15}
    with World([0, 0, 1, 1], **settings) as world:
        handles = {rank: world.engines[rank].submit([Request(Kind.ALLREDUCE, "lonely", ONES, ONES.copy())])[0]
                   for rank in (0, 2)}  # fmt: skip
        note = log.wait_for("lonely")
        assert "waiting for rank 1, 3" in note and "submitted by rank 0, 2" in note
        report = log.wait_for("Stalled", "lonely")
        assert "waiting for rank 1, 3" in report and "submitted by rank 0, 2" in report
        for rank in (1, 3):
            handles[rank] = world.engines[rank].submit([Request(Kind.ALLREDUCE, "lonely", ONES, ONES.copy())])[0]
        for rank, handle in handles.items():
            assert (world.engines[rank].wait(handle, 5.0).output == 4).all()


@needs_native
def test_row_10_stall_shutdown_ends_the_job_on_all_ranks(log: Listener) -> None:
    settings: dict[str, Any] = {"stall_check_time_seconds": 0.1, "stall_shutdown_time_seconds": 0.2}
    with World([0, 0, 1], **settings) as world:
        found = world.attempt(lambda engine, rank: allreduce(engine, [1.0], "lonely") if rank else None)
        assert all(isinstance(error, errors.HorovodInternalError) for error in found[1:]), found
        assert all("lonely" in str(error) and "rank 0" in str(error) for error in found[1:]), found
        with pytest.raises(errors.HorovodInternalError):
            allreduce(world.engines[0], [1.0], "lonely")
    log.wait_for("lonely")


# --- Ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("links", LINKS)
@pytest.mark.parametrize("engine", ENGINES)
def test_leaving_ends_pending_operations_on_all_ranks(engine: str, links: str) -> None:
    with World(LINKS[links], engine) as world:
        pending = [world.engines[rank].submit([request()])[0] for rank in (0, 1)]
        world.engines[2].leave()
        for rank, handle in enumerate(pending):
            with pytest.raises(errors.ShutDown):
                world.engines[rank].wait(handle, 5.0)
        with pytest.raises(errors.HorovodInternalError):
            do(world.engines[2], request(), 5.0)
        after = world.attempt(lambda engine_, rank: do(engine_, request(), 5.0) if rank < 2 else None)
        assert all(isinstance(error, errors.ShutDown) for error in after[:2]), after


@pytest.mark.parametrize("links", LINKS)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_barrier_before_leaving_loses_nothing(engine: str, links: str) -> None:
    """The ranks leave as soon as their last operation is done; the operations of the others must still succeed."""

    def body(engine_: Engine, rank: int) -> None:
        for _ in range(3):
            allreduce(engine_, np.ones(50_000), None)
        barrier(engine_)
        engine_.leave()

    for _ in range(10 if engine == "native" else 3):
        with World(LINKS[links], engine) as world:
            world.run(body)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_second_request_with_the_same_name_is_refused_even_if_the_first_was_fast(engine: str) -> None:
    with World([0, 0], engine) as world:
        ahead, behind = world.engines
        for _ in range(100):
            [first] = ahead.submit([request(Kind.ALLGATHER)])
            [last] = behind.submit([request(Kind.ALLGATHER)])
            with pytest.raises(ValueError, match=r"\bt\b.*(first one)"):
                behind.submit([request(Kind.ALLGATHER)])
            ahead.wait(first, 5.0)
            behind.wait(last, 5.0)


@pytest.mark.parametrize("later", ["send", "receive"])
def test_a_name_is_free_again_when_a_later_send_or_receive_has_finished(later: str) -> None:
    """By the specification; engine_test.cc has it of the core."""
    with World([0, 0], "python") as world:
        ahead, behind = world.engines
        assert isinstance(behind, ReferenceEngine)
        for _ in range(10):
            [first] = ahead.submit([request(Kind.ALLGATHER)])
            [last] = behind.submit([request(Kind.ALLGATHER)])
            until(lambda last=last: behind.handles[last].done)  # type: ignore[misc]  # polling it would free the name
            there, here = (ahead, behind) if later == "receive" else (behind, ahead)
            send = Request(Kind.SEND, None, ONES, None, peer=1 if later == "receive" else 0)
            [sent] = there.submit([send])
            do(here, Request(Kind.RECEIVE, None, None, np.empty_like(ONES), peer=1 - send.peer), 5.0)
            there.wait(sent, 5.0)
            ahead.wait(first, 5.0)
            [again] = behind.submit([request(Kind.ALLGATHER)])
            do(ahead, request(Kind.ALLGATHER), 5.0)
            behind.wait(last, 5.0)
            behind.wait(again, 5.0)


@pytest.mark.parametrize("links", LINKS)
@pytest.mark.parametrize("engine", ENGINES)
def test_revoke_reaches_everyone(engine: str, links: str) -> None:
    with World(LINKS[links], engine) as world:
        pending = [world.engines[rank].submit([request()])[0] for rank in (0, 1)]
        world.engines[2].revoke(errors.PEER_LOST, 7, "rank 7 was taken away")
        for rank, handle in enumerate(pending):
            with pytest.raises(errors.PeerLost) as caught:
                world.engines[rank].wait(handle, 5.0)
            assert caught.value.rank == 7
        for engine_ in world.engines:
            with pytest.raises(errors.PeerLost):
                do(engine_, request(), 5.0)
