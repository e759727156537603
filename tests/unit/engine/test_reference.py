# Tests of the specification: arithmetic to the bit, the coordinator as a table.
# Touches only specification.py: no threads, no sockets.
"""The definitions of specification.py, checked by hand-worked cases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from farandole.engine import specification as spec
from farandole.engine.interface import DType, Kind, ReduceOp, Request

SUM = {"dtype": DType.FLOAT16, "op": ReduceOp.SUM, "prescale": 1.0, "postscale": 1.0}


def bf16(*values: float) -> np.ndarray[Any, Any]:
    return spec.narrow(np.array(values, np.float32), DType.BFLOAT16)


def test_bfloat16_rounds_to_nearest_even_and_keeps_nan() -> None:
    ulp = 2.0**-7
    assert list(bf16(1.0, 1.0 + ulp / 2, 1.0 + 3 * ulp / 2)) == [0x3F80, 0x3F80, 0x3F82]
    nan = np.array([0x7F800001], np.uint32).view(np.float32)  # would round to infinity without care
    assert np.isnan(spec.widen(spec.narrow(nan, DType.BFLOAT16), DType.BFLOAT16)).all()


def test_sixteen_bit_floats_are_accumulated_in_32_bits() -> None:
    # In fp16 arithmetic 2048 + 1 is 2048 again and again; in fp32 the ones survive until the single rounding.
    parts = [np.array([x], np.float16) for x in (2048, 1, 1, 1, 1)]
    assert spec.reduce(parts, DType.FLOAT16, ReduceOp.SUM)[0] == 2052


def test_each_host_is_rounded_once_in_the_order_of_host_numbers() -> None:
    parts = [np.array([x], np.float16) for x in (2048, 1, 1, 1)]
    one_host = spec.ordered_reduce(parts, [0, 0, 0, 0], SUM)
    two_hosts = spec.ordered_reduce(parts, [0, 0, 1, 1], SUM)  # 2048 + 1 rounds to 2048, then + 2
    assert (one_host[0], two_hosts[0]) == (np.float16(2051), np.float16(2050))
    thirds = [np.array([x], np.float32) for x in (1e8, 1.0, -1e8)]
    fp32 = {**SUM, "dtype": DType.FLOAT32}
    assert spec.ordered_reduce(thirds, [0, 0, 0], fp32)[0] == 0.0
    assert spec.ordered_reduce(thirds, [0, 1, 0], fp32)[0] == 1.0  # ranks 0 and 2 share a host and come first


@pytest.mark.parametrize(
    ("dtype", "values", "prescale", "postscale", "divisor", "expected"),
    [
        (np.int8, [127, 1], 1.0, 1.0, 1, -128),  # wraps
        (np.int32, [-7, 0], 1.0, 1.0, 2, -3),  # towards zero
        (np.int32, [7, 7], 0.5, 1.0, 1, 6),  # each product is truncated
        (np.int16, [30000, 0], 2.0, 1.0, 1, 32767),  # saturates
        (np.int64, [3, 4], 1.0, 0.5, 1, 3),
        (np.uint8, [200, 100], 1.0, 1.0, 2, 22),  # wraps to 44, then divides
    ],
)
def test_integers_wrap_truncate_and_saturate(
    dtype: type, values: list[int], prescale: float, postscale: float, divisor: int, expected: int
) -> None:
    sources: list[np.ndarray] = [np.array([value], dtype) for value in values]
    kind = DType[np.dtype(dtype).name.upper()]
    assert spec.reduce(sources, kind, ReduceOp.SUM, prescale, postscale, divisor)[0] == expected


def test_adasum_adds_orthogonal_and_averages_parallel_gradients() -> None:
    x, y = np.array([2.0, 0.0]), np.array([0.0, 3.0])
    assert list(spec.adasum_pair(x, y, DType.FLOAT64)) == [2.0, 3.0]
    assert list(spec.adasum_pair(x, x, DType.FLOAT64)) == [2.0, 0.0]
    assert list(spec.adasum_pair(x, 0 * x, DType.FLOAT64)) == [2.0, 0.0]


def test_min_and_max_do_not_depend_on_the_order() -> None:
    zeros = [np.array([0.0, -0.0]), np.array([-0.0, 0.0])]
    assert np.signbit(spec.smaller(*zeros)).all() and not np.signbit(spec.larger(*zeros)).any()
    assert np.isnan(spec.smaller(np.array([np.nan, 1.0]), np.array([1.0, np.nan]))).all()


def test_shares_of_a_reducescatter_cover_all_rows() -> None:
    assert [spec.share_of(member, 7, 3) for member in range(3)] == [slice(0, 3), slice(3, 5), slice(5, 7)]
    assert [spec.share_of(member, 1, 3) for member in range(3)] == [slice(0, 1), slice(1, 1), slice(1, 1)]


def asked(name: str = "a", **changes: Any) -> spec.RequestData:
    base = {"kind": Kind.ALLREDUCE, "name": name, "dtype": DType.FLOAT32, "op": ReduceOp.SUM, "root": -1}
    base |= {"prescale": 1.0, "postscale": 1.0, "shape": [2], "splits": None, "device": "CPU", "bundle": None}
    return base | changes


@pytest.mark.parametrize(
    ("one", "two", "message"),
    [
        ({}, {"dtype": DType.INT32}, "Mismatched data types"),
        ({}, {"device": "GPU"}, "Mismatched ALLREDUCE CPU/GPU device selection"),
        ({}, {"kind": Kind.ALLGATHER}, "Mismatched operations"),
        ({}, {"shape": [3]}, "Mismatched ALLREDUCE tensor shapes"),
        ({}, {"shape": [2, 1]}, "Mismatched ALLREDUCE tensor shapes"),
        ({}, {"op": ReduceOp.MAX}, "Mismatched reduction operation"),
        ({}, {"prescale": 2.0}, "Mismatched prescale"),
        ({"kind": Kind.BROADCAST, "root": 0}, {"kind": Kind.BROADCAST, "root": 1}, "Mismatched BROADCAST root ranks"),
        ({"kind": Kind.ALLGATHER, "shape": [1, 2]}, {"kind": Kind.ALLGATHER, "shape": [9, 2]}, ""),
        ({"kind": Kind.ALLGATHER, "shape": [1, 2]}, {"kind": Kind.ALLGATHER, "shape": [1, 3]}, "Mismatched ALLGATHER"),
    ],
)
def test_mismatches_have_the_texts_of_the_contract(one: spec.RequestData, two: spec.RequestData, message: str) -> None:
    found = spec.mismatch([asked(**one), asked(**two)])
    assert found.startswith(message) and bool(found) == bool(message)


def test_coordinator_orders_what_is_complete_and_keeps_the_rest() -> None:
    coordinator = spec.Coordinator(2)
    assert coordinator.submit(0, asked("a")) == []
    assert [b["name"] for b in coordinator.submit(1, asked("b"))] == []
    assert [b["name"] for b in coordinator.submit(0, asked("b"))] == ["b"]
    assert [b["name"] for b in coordinator.submit(1, asked("a"))] == ["a"]


def test_the_coordinator_keeps_the_members_of_a_bundle_together() -> None:
    coordinator = spec.Coordinator(2)
    parts = [asked("x", bundle=["x", "y"]), asked("y", bundle=["x", "y"])]
    assert coordinator.submit(0, parts[0]) + coordinator.submit(0, parts[1]) + coordinator.submit(1, parts[0]) == []
    assert [b["name"] for b in coordinator.submit(1, parts[1])] == ["x", "y"]


def test_coordinator_join_completes_reductions_and_refuses_the_rest() -> None:
    coordinator = spec.Coordinator(3)
    assert coordinator.submit(0, asked("a")) + coordinator.submit(1, asked("a")) == []
    assert [b["name"] for b in coordinator.submit(2, asked(kind=Kind.JOIN))] == ["a"]
    coordinator.submit(0, asked("g", kind=Kind.ALLGATHER))
    (refused,) = coordinator.submit(1, asked("g", kind=Kind.ALLGATHER))
    assert "not supported with Join" in refused["error"][1]
    assert coordinator.submit(1, asked(kind=Kind.JOIN)) == []
    (last,) = coordinator.submit(0, asked(kind=Kind.JOIN))
    assert (last["kind"], last["value"]) == (Kind.JOIN, 0)


@pytest.mark.parametrize(
    "request_",
    [
        Request(Kind.ALLREDUCE, "a"),
        Request(Kind.ALLREDUCE, "a", np.ones((4, 4))[:, 1], np.ones(4)),
        Request(Kind.ALLREDUCE, "a", np.ones(4), np.ones(5)),
        Request(Kind.ALLREDUCE, "a", np.ones(4, np.complex64), np.ones(4, np.complex64)),
        Request(Kind.ALLREDUCE, "a", np.ones(4, np.int32), np.ones(4, np.int32), op=ReduceOp.ADASUM),
        Request(Kind.BROADCAST, "a", np.ones(4), np.ones(4), peer=2),
        Request(Kind.BROADCAST, "a", np.ones(4), np.ones(4), peer=-1),
        Request(Kind.ALLTOALL, "a", np.ones(5)),
        Request(Kind.ALLTOALL, "a", np.ones(5), splits=[5]),
        Request(Kind.ALLTOALL, "a", np.ones(5), splits=[-1, 2]),
        Request(Kind.ALLTOALL, "a", np.ones(5), splits=[3, 3]),
        Request(Kind.ALLREDUCE, "a", np.ones(4, np.bool_), np.ones(4, np.bool_), op=ReduceOp.AVERAGE),
        Request(Kind.SEND, "a", np.ones(3), peer=7),
        Request(Kind.JOIN, group=3),
    ],
    ids=lambda request: f"{request.kind.name}-{request.splits}",
)
def test_bad_arguments_are_seen_before_anything_is_sent(request_: Request) -> None:
    with pytest.raises(ValueError):
        spec.check(request_, [0, 1], 0)


def test_a_request_that_is_refused_on_all_ranks() -> None:
    def why(*requests: spec.RequestData) -> str:
        found = spec.rejection(requests, joined=False)
        return found[1] if found else ""

    scalar = asked(kind=Kind.ALLGATHER, shape=[])
    assert why(scalar, scalar).startswith("Process-set rank zero tried to allgather")
    assert why(asked(kind=Kind.REDUCESCATTER, op=ReduceOp.MIN)).startswith("Reducescatter currently only supports")
    assert why(asked(), asked()) == ""


def test_unknown_and_foreign_groups() -> None:
    with pytest.raises(ValueError, match="unknown"):
        spec.check(Request(Kind.BARRIER, group=9), None, 0)
    with pytest.raises(ValueError, match="not a member"):
        spec.check(Request(Kind.BARRIER, group=9), [1, 2], 0)
