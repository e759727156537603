# Prepared requests: which tensors they run on, what they keep alive, and when the ordinary request is used.
# Touches the native engine in a world of one, and torch, whose tensors can be read without an export.
from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from alarms import interrupted
from waiting import until

from farandole.engine.interface import DType, Kind, ReduceOp, Request, Span
from farandole.engine.library import LIBRARY
from farandole.engine.native import NativeEngine

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="the native library is not built")
torch = pytest.importorskip("torch")
if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
    pytest.skip("this torch has no table of DLPack's functions", allow_module_level=True)

Tensor = Any


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


def test_it_runs_on_every_tensor_of_its_kind(engine: NativeEngine) -> None:
    call = prepared(engine, prescale=2.0)
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
def test_another_operation_takes_the_general_path(engine: NativeEngine, other: Callable[[], Any]) -> None:
    call, tensor = prepared(engine), other()
    assert call.run(tensor, tensor) is NotImplemented
    assert engine.pending == 0


def test_types_without_the_table_cannot_be_prepared(engine: NativeEngine) -> None:
    assert engine.prepare(sum_of_three(), list, spans) is None


def test_an_interrupt_does_not_free_the_memory(waiting: NativeEngine) -> None:
    call, tensor = prepared(waiting), torch.ones(3)
    alive = weakref.ref(tensor)
    with interrupted(0.05):
        call.run(tensor, tensor)
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
    reference = weakref.ref(owner)
    span = Span(8, (1,), owner, owner)
    owner.prepared = waiting.prepare(Request(Kind.ALLREDUCE, "x", span, None, DType.UINT8), torch.Tensor, spans)
    del span
    assert gc.is_tracked(owner.prepared)
    del owner
    gc.collect()
    assert reference() is None


def test_a_prepared_call_takes_two_arguments(engine: NativeEngine) -> None:
    with pytest.raises(TypeError, match="tensor, result"):
        prepared(engine).run(torch.ones(3))
