# The native engine's edges: a library that is missing or wrong, memory on loan, threads, signals, forks.
# Touches farandole.library, farandole.native and the built library, in worlds of one.
"""library.py and native.py."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from waiting import in_time, until

from farandole import errors, library
from farandole.config import Config
from farandole.engine import COUNTERS, DType, Kind, ReduceOp, Request
from farandole.native import COPIED_BYTES, NativeEngine


@pytest.fixture
def engine() -> Iterator[NativeEngine]:
    """A world of one, started."""
    engine = NativeEngine(Config(), 0, [0])
    engine.start(5.0)
    yield engine
    engine.close()


def receive(engine: NativeEngine, array: np.ndarray, tag: int = 0) -> int:
    [handle] = engine.submit([Request(Kind.RECEIVE, output=array, peer=0, tag=tag)])
    return handle


def send(engine: NativeEngine, array: np.ndarray, tag: int = 0) -> None:
    [handle] = engine.submit([Request(Kind.SEND, input=array, peer=0, tag=tag)])
    engine.wait(handle)


def test_a_missing_library_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(errors.LibraryMissing) as caught:
        library.load(str(tmp_path / "none.so"))
    for word in ("none.so", "cmake --build", "FARANDOLE_ENGINE=python"):
        assert word in str(caught.value)


def test_a_file_that_is_no_library_is_named(tmp_path: Path) -> None:
    path = tmp_path / "text.so"
    path.write_text("not a library")
    with pytest.raises(errors.LibraryMissing, match="cannot be used"):
        library.load(str(path))


def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "package_version", lambda: "99.0.0")
    with pytest.raises(errors.LibraryMissing, match=r"99\.0\.0: rebuild"):
        library.load.__wrapped__()


def test_impossible_options_are_a_value_error() -> None:
    with pytest.raises(ValueError, match="rank 3"):
        NativeEngine(Config(), 3, [0])


def test_a_batch_keeps_every_field_apart(engine: NativeEngine) -> None:
    inputs = [np.full((index + 1, 2), index, dtype=np.float64) for index in range(20)]
    requests = [
        Request(Kind.ALLREDUCE, f"tensor {index} é", array, np.empty_like(array), prescale=2.0, postscale=index)
        for index, array in enumerate(inputs)
    ]
    handles = engine.submit(requests, bundle=True)
    assert len(set(handles)) == 20
    for index, handle in reversed(list(enumerate(handles))):
        output = engine.wait(handle).output
        assert output is requests[index].output
        np.testing.assert_array_equal(output, inputs[index] * 2.0 * index)


def test_requests_larger_than_the_arena(engine: NativeEngine) -> None:
    array = np.ones(1)
    requests = [Request(Kind.ALLREDUCE, f"{index}" + "x" * 1000, array, np.empty(1)) for index in range(200)]
    for handle in engine.submit(requests):
        engine.wait(handle)


def test_memory_on_loan_outlives_handle_and_engine() -> None:
    engine = NativeEngine(Config(), 0, [0])
    engine.start(5.0)
    array = np.arange(COPIED_BYTES, dtype=np.int32)
    [handle] = engine.submit([Request(Kind.ALLGATHER, input=array)])
    view = engine.wait(handle).output[100:]
    assert not view.flags.owndata
    with pytest.raises(ValueError, match="no handle"):
        engine.wait(handle)
    engine.close()
    engine.close()
    np.testing.assert_array_equal(view, array[100:])
    assert engine._undestroyed
    del view
    gc.collect()
    assert not engine._undestroyed


def test_small_results_are_not_on_loan(engine: NativeEngine) -> None:
    [handle] = engine.submit([Request(Kind.ALLGATHER, input=np.ones(3))])
    assert engine.wait(handle).output.flags.owndata
    assert not engine._loans


def test_inputs_stay_alive_until_the_operation_is_done(engine: NativeEngine) -> None:
    handle = receive(engine, np.zeros(1000))
    gc.collect()
    send(engine, np.ones(1000))
    assert engine.wait(handle).output.sum() == 1000


def test_unknown_handles_and_bad_arrays(engine: NativeEngine) -> None:
    for call in (engine.poll, engine.wait):
        with pytest.raises(ValueError, match="no handle 4711"):
            call(4711)
    with pytest.raises(ValueError, match="not contiguous"):
        engine.submit([Request(Kind.ALLREDUCE, input=np.ones((3, 3))[:, 0], output=np.ones(3))])
    with pytest.raises(ValueError, match="out of range"):
        engine.submit([Request(Kind.SEND, input=np.ones(1), peer=0, tag=1 << 70)])
    assert engine.submit([]) == []


def test_close_ends_the_waits_of_other_threads(engine: NativeEngine) -> None:
    handle = receive(engine, np.zeros(1))
    ended: list[Exception] = []

    def wait() -> None:
        try:
            engine.wait(handle)
        except Exception as error:
            ended.append(error)

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    until(lambda: len(engine._calls) == len(threads))  # all of them wait
    engine.close()
    for thread in threads:
        thread.join(5.0)
    assert len(ended) == 4
    # One of them gets the outcome, the others find the handle gone or the engine closed.
    assert any(isinstance(error, errors.ShutDown) for error in ended)
    assert all(isinstance(error, (errors.ShutDown, ValueError)) for error in ended)
    with pytest.raises(errors.ShutDown):
        engine.submit([Request(Kind.BARRIER)])


def test_signal_handlers_run_while_a_thread_waits(engine: NativeEngine) -> None:
    class Alarm(Exception):
        pass

    def ring(number: int, frame: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    handle = receive(engine, np.zeros(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        began = time.monotonic()
        with pytest.raises(Alarm):
            engine.wait(handle)
        in_time(time.monotonic() - began, 2.0, "a signal's handler in a wait")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    send(engine, np.ones(1))
    assert engine.wait(handle).output.tolist() == [1.0]


def in_child(work: Callable[[], bool]) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if work() else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_child_is_refused_also_while_another_thread_waits(engine: NativeEngine) -> None:
    [handle] = engine.submit([Request(Kind.ALLGATHER, input=np.zeros(COPIED_BYTES, np.int64))])
    loan = [engine.wait(handle).output]
    pending = receive(engine, np.zeros(1))
    waiter = threading.Thread(target=engine.wait, args=(pending,))
    waiter.start()
    until(lambda: bool(engine._calls))

    def work() -> bool:
        for call in (lambda: engine.submit([Request(Kind.BARRIER)]), lambda: engine.leave(), lambda: engine.poll(1)):
            try:
                call()
            except errors.HorovodInternalError as error:
                assert "belongs to the parent" in str(error)
            else:
                return False
        loan.clear()
        engine.close()
        return True

    assert in_child(work) == 0
    send(engine, np.ones(1))
    waiter.join(5.0)
    assert not waiter.is_alive()
    assert loan[0].sum() == 0


def test_counters_have_names(engine: NativeEngine) -> None:
    assert all(engine.counter(name) >= 0 for name in COUNTERS)
    with pytest.raises(ValueError, match="tuple"):
        engine.counter("speed")


def test_several_engines_in_one_process() -> None:
    engines = [NativeEngine(Config(), 0, [0]) for _ in range(8)]
    for engine in engines:
        engine.start(5.0)
    for number, engine in enumerate(engines):
        array = np.full(3, number, dtype=np.uint16)
        request = Request(Kind.ALLREDUCE, "x", array, np.empty_like(array), DType.UINT16, ReduceOp.MAX)
        [handle] = engine.submit([request])
        assert engine.wait(handle).output.tolist() == [number] * 3
    for engine in engines:
        engine.close()
