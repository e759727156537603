# The native engine's edges: a missing or wrong library, results in the core's memory, threads, signals, forks.
# Touches farandole.engine.library and native, the extension and the built library, in worlds of one.
"""library.py, native.py and core/python/."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from alarms import interrupted
from waiting import in_time, until

from farandole.base import errors
from farandole.base.config import Config
from farandole.engine import library
from farandole.engine.interface import COUNTERS, DType, Kind, ReduceOp, Request, Span
from farandole.engine.library import load
from farandole.engine.native import NativeEngine

COPIED_BYTES = 64 << 10  # kCopiedBytes in core/python/outcome.cc


def receive(engine: NativeEngine, array: np.ndarray, tag: int = 0) -> int:
    [handle] = engine.submit([Request(Kind.RECEIVE, output=array, peer=0, tag=tag)])
    return handle


def send(engine: NativeEngine, array: np.ndarray, tag: int = 0) -> None:
    [handle] = engine.submit([Request(Kind.SEND, input=array, peer=0, tag=tag)])
    engine.wait(handle)


def test_a_missing_library_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(errors.LibraryMissing) as caught:
        load(str(tmp_path / "none.so"))
    for word in ("none.so", "cmake --build", "FARANDOLE_ENGINE=python"):
        assert word in str(caught.value)


def test_a_file_that_is_no_library_is_named(tmp_path: Path) -> None:
    path = tmp_path / "text.so"
    path.write_text("not a library")
    with pytest.raises(errors.LibraryMissing, match="cannot be used"):
        load(str(path))


def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "package_version", lambda: "99.0.0")
    with pytest.raises(errors.LibraryMissing, match=r"99\.0\.0: rebuild"):
        load.__wrapped__()


def test_impossible_options_are_a_value_error() -> None:
    with pytest.raises(ValueError, match="rank 3"):
        NativeEngine(Config(), 3, [0])


def test_fields_of_a_batch_do_not_mix(engine: NativeEngine) -> None:
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


def test_memory_of_results_outlives_handle_and_engine() -> None:
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
    assert not engine.freed
    del view
    gc.collect()
    assert engine.freed


def test_small_results_are_not_lent(engine: NativeEngine) -> None:
    [handle] = engine.submit([Request(Kind.ALLGATHER, input=np.ones(3))])
    assert engine.wait(handle).output.flags.owndata
    assert engine.loans == 0


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


class Exported:
    """A tensor that others reach by DLPack alone."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self) -> object:
        return self.array.__dlpack__()


def test_memory_by_buffer_by_address_and_by_dlpack(engine: NativeEngine) -> None:
    plain = np.arange(6, dtype=np.float32).reshape(2, 3)
    kinds: tuple[Any, ...] = (
        plain,
        memoryview(plain),  # type: ignore[arg-type]
        Span(plain.ctypes.data, plain.shape, plain, plain),
        Exported(plain),
    )
    for number, given in enumerate(kinds):
        output = np.empty_like(plain)
        engine.run(Request(Kind.ALLREDUCE, f"kind {number}", given, output, DType.FLOAT32, prescale=2.0))
        np.testing.assert_array_equal(output, 2 * plain)
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kept = np.arange(3).astype(ml_dtypes.bfloat16)  # of no type that the buffer protocol knows
    bits = np.empty(3, np.uint16)
    engine.run(Request(Kind.ALLREDUCE, "by address", kept, bits, DType.BFLOAT16, prescale=2.0))
    assert bits.view(ml_dtypes.bfloat16).tolist() == [0.0, 2.0, 4.0]


def test_memory_that_cannot_be_used_is_named(engine: NativeEngine) -> None:
    fixed = np.ones(3)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="cannot be written"):
        engine.run(Request(Kind.ALLREDUCE, "fixed", np.ones(3), fixed))
    for bad in ([1.0, 2.0], "text", 7):
        with pytest.raises(TypeError, match="no memory that can be read"):
            engine.run(Request(Kind.ALLREDUCE, "bad", bad, np.ones(2), DType.FLOAT64))
    with pytest.raises(ValueError, match="not contiguous"):
        engine.run(Request(Kind.ALLREDUCE, "strided", Exported(np.ones((4, 4))[:, 1]), np.ones(4), DType.FLOAT64))
    with pytest.raises(ValueError, match="zero bytes"):
        engine.run(Request(Kind.ALLREDUCE, "a\0b", np.ones(2), np.ones(2)))
    with pytest.raises(AttributeError):
        engine.run(object())  # type: ignore[arg-type]
    assert engine.pending == 0 and engine.calls == 0


def test_wrong_arguments_are_a_type_error(engine: NativeEngine) -> None:
    wrong: list[Callable[[], object]] = [
        lambda: engine.submit(),  # type: ignore[call-arg]
        lambda: engine.submit([], requests=[]),  # type: ignore[misc]
        lambda: engine.wait(1, none=2),  # type: ignore[call-arg]
        lambda: engine.wait("x"),  # type: ignore[arg-type]
        lambda: engine.prepare(Request(Kind.BARRIER)),  # type: ignore[call-arg]
        lambda: engine.submit([], 1, 2, 3),  # type: ignore[arg-type, call-arg]
        lambda: engine.submit(7),  # type: ignore[arg-type]
    ]
    for call in wrong:
        with pytest.raises(TypeError):
            call()


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
    until(lambda: engine.calls == len(threads))  # all of them wait
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
    handle = receive(engine, np.zeros(1))
    began = time.monotonic()
    with interrupted(0.05):
        engine.wait(handle)
    in_time(time.monotonic() - began, 2.0, "a signal's handler in a wait")
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
    borrowed = [engine.wait(handle).output]
    pending = receive(engine, np.zeros(1))
    waiter = threading.Thread(target=engine.wait, args=(pending,))
    waiter.start()
    until(lambda: engine.calls > 0)

    def work() -> bool:
        for call in (lambda: engine.submit([Request(Kind.BARRIER)]), lambda: engine.leave(), lambda: engine.poll(1)):
            try:
                call()
            except errors.HorovodInternalError as error:
                assert "belongs to the parent" in str(error)
            else:
                return False
        borrowed.clear()
        engine.close()
        return True

    assert in_child(work) == 0
    send(engine, np.ones(1))
    waiter.join(5.0)
    assert not waiter.is_alive()
    assert borrowed[0].sum() == 0


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
