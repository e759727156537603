# Prepared requests: which tensors they run on, what they keep alive, and what they leave to the ordinary way.
# Touches the native engine in a world of one, and torch, whose tensors can be read without an export.
from __future__ import annotations

import gc
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from waiting import until

from farandole.base.config import Config
from farandole.engine.interface import DType, Kind, ReduceOp, Request, Span
from farandole.engine.library import LIBRARY
from farandole.engine.native import NativeEngine

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="the native library is not built")
torch = pytest.importorskip("torch")
if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
    pytest.skip("this torch has no table of DLPack's functions", allow_module_level=True)

Tensor = Any


@pytest.fixture
def alone() -> Iterator[NativeEngine]:
    engine = NativeEngine(Config(), 0, [0])
    engine.start(5.0)
    yield engine
    engine.close()


@pytest.fixture
def waiting() -> Iterator[NativeEngine]:
    engine = NativeEngine(Config(), 0, [0, 0])  # the other rank never comes
    yield engine
    engine.close()


def spans(tensor: Tensor, result: Tensor | None) -> tuple[Span, Span | None]:
    def span(one: Tensor) -> Span:
        return Span(one.data_ptr(), tuple(one.shape), one, one)

    return span(tensor), None if result is None else span(result)


def sum_of_three(**changes: Any) -> Request:
    place = Span(0, (3,), None, None)
    return Request(Kind.ALLREDUCE, "again", place, place, DType.FLOAT32, ReduceOp.SUM, **changes)


def prepared(engine: NativeEngine, **changes: Any) -> Any:
    found = engine.prepare(sum_of_three(**changes), torch.Tensor, spans)
    assert found is not None
    return found


def test_it_runs_on_every_tensor_of_its_kind(alone: NativeEngine) -> None:
    call = prepared(alone, prescale=2.0)
    for start in (1.0, 5.0):
        tensor = torch.full((3,), start)
        assert call.run(tensor, tensor) is None
        assert tensor.tolist() == [2 * start] * 3
    whole, result = torch.arange(9.0).reshape(3, 3), torch.zeros(3)
    assert call.run(whole[1], result) is None  # a row within another tensor
    assert result.tolist() == [6.0, 8.0, 10.0]
    assert whole[1].tolist() == [3.0, 4.0, 5.0]


@pytest.mark.parametrize(
    "other",
    [
        lambda: torch.ones(4),
        lambda: torch.ones(3, 1),
        lambda: torch.ones(()),
        lambda: torch.ones(3, dtype=torch.float64),
        lambda: torch.ones(3, dtype=torch.int32),
        lambda: torch.arange(9.0).reshape(3, 3)[:, 1],
        lambda: torch.nn.Parameter(torch.ones(3)),
        lambda: torch.ones(3, device="meta"),
        lambda: [1.0, 2.0, 3.0],
        lambda: None,
    ],
)
def test_another_operation_takes_the_general_path(alone: NativeEngine, other: Callable[[], Any]) -> None:
    call, tensor = prepared(alone), other()
    assert call.run(tensor, tensor) is NotImplemented
    assert alone.pending == 0


def test_types_without_the_table_cannot_be_prepared(alone: NativeEngine) -> None:
    assert alone.prepare(sum_of_three(), list, spans) is None


def test_an_interrupt_does_not_free_the_memory(waiting: NativeEngine) -> None:
    class Interrupted(Exception):
        pass

    def handler(_number: int, _frame: FrameType | None) -> None:
        raise Interrupted

    call, tensor = prepared(waiting), torch.ones(3)
    alive = weakref.ref(tensor)
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(Interrupted):
            call.run(tensor, tensor)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    del tensor
    gc.collect()
    assert alive() is not None  # the core still works on it


def test_a_second_thread_takes_the_general_path(waiting: NativeEngine) -> None:
    call, answers = prepared(waiting), []

    def run() -> None:
        tensor = torch.ones(3)
        try:
            answers.append(call.run(tensor, tensor))
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    tensor = torch.ones(3)
    try:
        until(lambda: waiting.calls == 1)  # the thread waits in the core
        assert call.run(tensor, tensor) is NotImplemented
    finally:
        waiting.close()
        thread.join()
    assert isinstance(answers[0], Exception)


def test_a_reference_cycle_through_it_is_collected(waiting: NativeEngine) -> None:
    class Owner:
        prepared: Any = None

    owner = Owner()
    gone = weakref.ref(owner)
    span = Span(8, (1,), owner, owner)
    owner.prepared = waiting.prepare(Request(Kind.ALLREDUCE, "x", span, None, DType.UINT8), torch.Tensor, spans)
    del span
    assert gc.is_tracked(owner.prepared)
    del owner
    gc.collect()
    assert gone() is None


def test_a_prepared_call_takes_two_arguments(alone: NativeEngine) -> None:
    with pytest.raises(TypeError, match="tensor, result"):
        prepared(alone).run(torch.ones(3))
