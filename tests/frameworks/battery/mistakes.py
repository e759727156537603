# Cases: mistakes and mismatches give the contract's error, and the job continues.
# Touches binding.py, errors, NumPy and, for requests that CPU tensors cannot make, the engine.
"""Each mistake is followed by an operation that must work; run.py adds another after the case."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from farandole.base.errors import HorovodInternalError
from farandole.engine.interface import DType, Kind, Request
from farandole.world.runtime import runtime

from .binding import ASYNC, JOIN, Table, fails

MISTAKES = Table()
case = MISTAKES.case


def check_allreduce(b: Any, size: int) -> None:
    b.holds(b.hvd.allreduce(b.tensor([1.0]), name="t", op=b.hvd.Sum), [size])


@case()
def the_ranks_disagree(b: Any, rank: int, size: int) -> None:
    ones = np.ones(4)

    def reduce(shape: Any = (4,), dtype: DType = DType.FLOAT32, **more: Any) -> Any:
        return b.hvd.allreduce(b.tensor(np.ones(shape), dtype), name="t", **{"op": b.hvd.Sum, **more})

    pairs = (
        ("Mismatched data types", reduce, lambda: reduce(dtype=DType.FLOAT64)),
        ("Mismatched ALLREDUCE tensor shapes", reduce, lambda: reduce(5)),
        ("Mismatched ALLREDUCE tensor shapes", reduce, lambda: reduce((2, 2))),
        ("Mismatched reduction operation", reduce, lambda: reduce(op=b.hvd.Max)),
        ("Mismatched prescale", reduce, lambda: reduce(prescale_factor=2.0)),
        ("Mismatched prescale", reduce, lambda: reduce(postscale_factor=2.0)),
        (
            "Mismatched BROADCAST root ranks",
            lambda: b.hvd.broadcast(b.tensor(ones), 0, name="t"),
            lambda: b.hvd.broadcast(b.tensor(ones), 1, name="t"),
        ),
        (
            "Mismatched BROADCAST tensor shapes",
            lambda: b.hvd.broadcast(b.tensor(ones), 0, name="t"),
            lambda: b.hvd.broadcast(b.tensor(ones[1:]), 0, name="t"),
        ),
        (
            "Mismatched ALLGATHER tensor shapes",
            lambda: b.hvd.allgather(b.tensor(np.ones((2, 3))), name="t"),
            lambda: b.hvd.allgather(b.tensor(np.ones((2, 4))), name="t"),
        ),
        (
            "Mismatched ALLGATHER tensor shapes",
            lambda: b.hvd.allgather(b.tensor(np.ones((2, 3))), name="t"),
            lambda: b.hvd.allgather(b.tensor(np.ones((2, 3, 1))), name="t"),
        ),
        (
            "Mismatched ALLTOALL tensor shapes",
            lambda: b.hvd.alltoall(b.tensor(np.ones((size, 3))), name="t"),
            lambda: b.hvd.alltoall(b.tensor(np.ones((size, 4))), name="t"),
        ),
        (
            "Mismatched REDUCESCATTER tensor shapes",
            lambda: b.hvd.reducescatter(b.tensor(np.ones((3, 3))), name="t"),
            lambda: b.hvd.reducescatter(b.tensor(np.ones((3, 4))), name="t"),
        ),
    )
    types: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = [
        ("Mismatched data types", functools.partial(operation, DType.INT32), functools.partial(operation, DType.INT64))
        for operation in (
            lambda dtype: b.hvd.allgather(b.tensor(ones, dtype), name="t"),
            lambda dtype: b.hvd.broadcast(b.tensor(ones, dtype), 0, name="t"),
            lambda dtype: b.hvd.alltoall(b.tensor(np.ones(size), dtype), name="t"),
            lambda dtype: b.hvd.reducescatter(b.tensor(ones, dtype), name="t"),
        )
    ]
    for message, one, two in (*pairs, *types):
        for odd in (0, size - 1):
            fails(HorovodInternalError, message, two if rank == odd else one)
            check_allreduce(b, size)


@case()
def one_rank_has_its_tensor_on_a_gpu(b: Any, rank: int, size: int) -> None:
    """The request has a device number, as for a CUDA tensor, although its memory is the host's."""
    engine = runtime.world.engine
    for kind in (Kind.ALLREDUCE, Kind.BROADCAST, Kind.REDUCESCATTER):

        def begin(device: int, kind: Kind = kind) -> Any:
            array = np.ones(size, np.float32)
            output = np.empty(1, np.float32) if kind == Kind.REDUCESCATTER else array
            [handle] = engine.submit([Request(kind, "t", array, output, peer=0, device=device)])
            return engine.wait(handle).output

        message = f"Mismatched {kind.name} CPU/GPU device selection"
        fails(HorovodInternalError, message, lambda: begin(0 if rank == size - 1 else -1))
        assert begin(0) is not None
        check_allreduce(b, size)


@case()
def groups_that_differ(b: Any, rank: int, size: int) -> None:
    one, other = b.tensor([1.0, 2.0]), b.tensor([1.0, 2.0, 3.0])
    odd = rank == size - 1
    for operation in (b.hvd.grouped_allreduce, b.hvd.grouped_reducescatter):
        fails(HorovodInternalError, "Mismatched", lambda: operation([one, other if odd else one], name="g"))  # noqa: B023
        check_allreduce(b, size)
    flat = b.tensor(np.ones((2, 2 + odd)))
    fails(HorovodInternalError, "Mismatched", lambda: b.hvd.grouped_allgather([one, flat], name="g"))
    check_allreduce(b, size)
    for operation in (b.hvd.grouped_allreduce, b.hvd.grouped_allgather, b.hvd.grouped_reducescatter):
        assert tuple(operation([])) == ()  # no operation and no rank to wait for
        fails((TypeError, ValueError), "", lambda: operation([one, None]))  # noqa: B023
    check_allreduce(b, size)


@case(ASYNC)
def a_rank_that_shuts_down(b: Any, rank: int, size: int) -> None:
    """A rank that waits for it gets the contract's error; a new world works."""
    if rank == 0:
        b.hvd.shutdown()
    else:
        handle = b.hvd.allreduce_async(b.tensor([1.0]), name="late")
        fails(HorovodInternalError, "", lambda: b.hvd.synchronize(handle))
        fails(HorovodInternalError, "", lambda: b.hvd.broadcast(b.tensor([1.0]), 1, name="later"))
        b.hvd.shutdown()
    for kind in (ValueError, RuntimeError):  # Horovod's rank() raises the one, its operations the other
        fails(kind, "Horovod has not been initialized; use hvd.init().", lambda: b.hvd.allreduce(b.tensor([1.0])))
    b.hvd.init()
    check_allreduce(b, size)


@case()
def scalars_have_no_rows(b: Any, rank: int, size: int) -> None:
    for name in ("allgather", "alltoall", "reducescatter"):
        message = f"Process-set rank zero tried to {name} a rank-zero tensor."
        fails(HorovodInternalError, message, lambda: getattr(b.hvd, name)(b.tensor(1.0)))  # noqa: B023
        check_allreduce(b, size)


@case()
def reducescatter_only_sums(b: Any, rank: int, size: int) -> None:
    for op in (b.hvd.Min, b.hvd.Max, b.hvd.Product, b.hvd.Adasum):
        message = "Reducescatter currently only supports"
        fails(HorovodInternalError, message, lambda: b.hvd.reducescatter(b.tensor([1.0, 2.0]), op=op))  # noqa: B023
        check_allreduce(b, size)


@case()
def average_and_op(b: Any, rank: int, size: int) -> None:
    fails(ValueError, "", lambda: b.hvd.allreduce(b.tensor([1.0]), average=True, op=b.hvd.Sum))
    fails(ValueError, "", lambda: b.hvd.allreduce(b.tensor([1.0]), op=99))
    for average, expected in ((True, 1.0), (False, size)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            b.holds(b.hvd.allreduce(b.tensor([1.0]), average=average), [expected])
        assert [warning.category for warning in caught] == [DeprecationWarning]
        assert caught[0].filename == __file__, caught[0].filename


@case()
def arguments_of_the_wrong_kind(b: Any, rank: int, size: int) -> None:
    ones = b.tensor([1.0] * size)
    for operation in (b.hvd.allreduce, b.hvd.allgather, b.hvd.alltoall, b.hvd.reducescatter):
        fails(TypeError, "name=5 is a int", lambda: operation(ones, name=5))  # noqa: B023
        fails((TypeError, ValueError), "", lambda: operation("not a tensor"))  # noqa: B023
        fails((TypeError, ValueError), "", lambda: operation(ones, process_set=[0]))  # noqa: B023
    fails(TypeError, "compression=", lambda: b.hvd.reducescatter(ones, compression="fp16"))
    fails(TypeError, "compression=", lambda: b.hvd.allreduce(ones, compression=None))
    fails(TypeError, "name=5 is a int", lambda: b.hvd.broadcast(ones, 0, name=5))
    fails(TypeError, "name=5 is a int", lambda: b.hvd.grouped_allreduce([ones], name=5))
    for operation in (b.hvd.allreduce, b.hvd.reducescatter):
        for factor in ("prescale_factor", "postscale_factor"):
            scale = {factor: float("nan")}
            fails(ValueError, f"{factor} is not a number", lambda: operation(ones, **scale))  # noqa: B023
            fails((TypeError, ValueError), "", lambda: operation(ones, **{factor: "two"}))  # noqa: B023
    check_allreduce(b, size)


@case()
def invalid_splits(b: Any, rank: int, size: int) -> None:
    rows = b.tensor(np.ones(2 * size))
    even = [2] * size
    for splits in (even[1:], [*even, 0], [3, *even[1:]], [-1, *even[1:]], [[2]] * size):
        fails(ValueError, "", lambda: b.hvd.alltoall(rows, splits=b.tensor(splits, DType.INT32)))  # noqa: B023
        check_allreduce(b, size)
    fails(ValueError, "", lambda: b.hvd.alltoall(rows, splits=b.tensor(even, DType.FLOAT32)))
    fails(ValueError, "", lambda: b.hvd.alltoall(b.tensor(np.ones(2 * size + 1))))


@case()
def roots_outside_the_set(b: Any, rank: int, size: int) -> None:
    for root in (-1, size):
        fails(ValueError, "", lambda: b.hvd.broadcast(b.tensor([1.0]), root))  # noqa: B023
    check_allreduce(b, size)


@case()
def process_sets_that_are_not_registered(b: Any, rank: int, size: int) -> None:
    unknown = b.hvd.ProcessSet([0, 1])
    for operation in (b.hvd.allreduce, b.hvd.allgather, b.hvd.alltoall, b.hvd.reducescatter):
        fails(ValueError, "", lambda: operation(b.tensor([1.0, 2.0]), process_set=unknown))  # noqa: B023
    check_allreduce(b, size)


@case()
def tensors_that_cannot_be_sent(b: Any, rank: int, size: int) -> None:
    for reason, tensor in b.unusable().items():
        for operation in (b.hvd.allreduce, b.hvd.allgather, b.hvd.alltoall, b.hvd.reducescatter):
            try:
                fails(ValueError, "", lambda: operation(tensor))  # noqa: B023
            except AssertionError as error:
                raise AssertionError(f"{reason}, {operation.__name__}: {error}") from None
    check_allreduce(b, size)


@case(ASYNC)
def a_name_that_is_already_pending(b: Any, rank: int, size: int) -> None:
    def begin() -> int:
        handle: int = b.hvd.allreduce_async(b.tensor([1.0]), name="twice", op=b.hvd.Sum)
        return handle

    # The first cannot be done while rank 0 has not begun it.
    if rank != 0:
        first = begin()
        message = "Requested to allreduce, allgather, or broadcast"
        # On the CPU the call itself refuses; memory of a device is submitted a little later.
        fails(ValueError, message, lambda: b.hvd.synchronize(begin()))
        check_allreduce(b, size)
    else:
        check_allreduce(b, size)
        first = begin()
    b.holds(b.hvd.synchronize(first), [size])


@case(ASYNC)
def unknown_handles(b: Any, rank: int, size: int) -> None:
    assert b.hvd.synchronize(12345) is None
    fails(ValueError, "", lambda: b.hvd.poll(12345))


@case(ASYNC)
def synchronize_raises_the_error_of_its_handle(b: Any, rank: int, size: int) -> None:
    good = b.hvd.allreduce_async(b.tensor([1.0]), name="good", op=b.hvd.Sum)
    bad = b.hvd.allreduce_async(b.tensor(np.ones(rank + 1)), name="bad")
    group = b.hvd.grouped_allreduce_async([b.tensor([1.0]), b.tensor(np.ones(rank + 1))], name="group")
    for handle in (bad, group):
        fails(HorovodInternalError, "Mismatched", lambda: b.hvd.synchronize(handle))  # noqa: B023
        assert b.hvd.synchronize(handle) is None
    b.holds(b.hvd.synchronize(good), [size])


@case(JOIN)
def only_reductions_while_a_rank_has_joined(b: Any, rank: int, size: int) -> None:
    if rank != 0:
        for operation in (b.hvd.allgather, lambda t: b.hvd.broadcast(t, 1), b.hvd.alltoall, b.hvd.reducescatter):
            fails(HorovodInternalError, "", lambda: operation(b.tensor(np.ones(size))))  # noqa: B023
        b.holds(b.hvd.allreduce(b.tensor([1.0]), op=b.hvd.Sum), [size - 1])
    assert b.hvd.join() in range(size)


@case()
def objects_that_cannot_be_pickled(b: Any, rank: int, size: int) -> None:
    thing = (number for number in range(3))
    fails((TypeError, ValueError), "", lambda: b.hvd.broadcast_object(thing, 0))
    fails((TypeError, ValueError), "", lambda: b.hvd.allgather_object(thing if rank == 1 else rank))
    check_allreduce(b, size)
