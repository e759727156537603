# Random programs: lists of collectives as plain data, how a rank runs them, and the expected results.
# Touches the types of engine/interface.py, and specification.py as the oracle; NumPy is the second oracle.
"""`programs(...)` is a hypothesis strategy, `run_program` is one rank's part, `check_program` checks the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from farandole.engine import specification as spec
from farandole.engine.interface import FLOATING, STORAGE, Array, DType, Engine, Kind, ReduceOp, Request

KINDS = [Kind.ALLREDUCE, Kind.ALLGATHER, Kind.BROADCAST, Kind.ALLTOALL, Kind.REDUCESCATTER, Kind.BARRIER, Kind.SEND]
FLOATS = list(FLOATING)


@dataclass(frozen=True)
class Item:
    """One collective. It is the same on all members except its data, which depends on the seed and the rank."""

    kind: Kind
    name: str | None
    ranks: tuple[int, ...]
    dtype: DType = DType.FLOAT32
    op: ReduceOp = ReduceOp.SUM
    shape: tuple[int, ...] = (1,)
    first_dims: tuple[int, ...] = ()  # allgather: rows by member
    splits: tuple[tuple[int, ...], ...] = ()  # alltoall: by sender
    root: int = 0  # member: broadcast's root, send's receiver
    prescale: float = 1.0
    postscale: float = 1.0
    in_place: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Program:
    """`steps` times the same submissions (bundles of items); each rank in its own order unless items are unnamed."""

    bundles: tuple[tuple[Item, ...], ...]
    steps: int = 1
    shuffle: int | None = 0  # seed of the orders; None: all ranks use the order of the list

    def order(self, rank: int, step: int, what: int) -> list[int]:
        order = list(range(len(self.bundles)))
        if self.shuffle is not None:
            np.random.default_rng([self.shuffle, rank, step, what]).shuffle(order)
        return order


def input_of(item: Item, member: int, step: int) -> Array:
    """A member's contribution: rounding must matter, overflow and NaN must not occur."""
    rng = np.random.default_rng([item.seed, member, step])
    shape = list(item.shape)
    if item.kind == Kind.ALLGATHER:
        shape[0] = item.first_dims[member]
    if item.kind == Kind.ALLTOALL:
        shape[0] = sum(item.splits[member])
    if item.dtype == DType.BOOL:
        return np.asarray(rng.random(shape) < 0.5)
    if item.dtype in FLOATS:
        values = rng.uniform(0.75, 1.25, shape) if item.op == ReduceOp.PRODUCT else rng.normal(0.0, 3.0, shape)
        wide = np.float64 if item.dtype == DType.FLOAT64 else np.float32
        return np.asarray(spec.narrow(np.asarray(values, wide), item.dtype))
    ends = np.iinfo(STORAGE[item.dtype])
    low, high = max(ends.min, -100), min(ends.max, 100)
    return np.asarray(rng.integers(low, high, shape, STORAGE[item.dtype], endpoint=True))


def request_of(item: Item, rank: int, group: int, step: int) -> Request:
    member = item.ranks.index(rank)
    data = input_of(item, member, step)
    request = Request(item.kind, item.name, data, None, item.dtype, item.op, group)
    request.prescale, request.postscale = item.prescale, item.postscale
    if item.kind == Kind.BARRIER:
        return Request(Kind.BARRIER, item.name, group=group)
    if item.kind == Kind.SEND:  # member `root` receives what the next member sends
        sender = (item.root + 1) % len(item.ranks)
        tag = item.seed
        if member == item.root:
            return Request(Kind.RECEIVE, None, None, np.empty_like(data), item.dtype, group=group, tag=tag,
                           peer=item.ranks[sender])  # fmt: skip
        return Request(Kind.SEND, None, data, None, item.dtype, group=group, tag=tag, peer=item.ranks[item.root])
    if item.kind in (Kind.ALLREDUCE, Kind.BROADCAST):
        request.output = data if item.in_place else np.empty_like(data)
        request.peer = item.ranks[item.root] if item.kind == Kind.BROADCAST else -1
    if item.kind == Kind.REDUCESCATTER:
        request.output = np.empty_like(data[spec.share_of(member, len(data), len(item.ranks))])
    if item.kind == Kind.ALLTOALL:
        request.splits = list(item.splits[member])
    return request


def takes_part(item: Item, rank: int) -> bool:
    if item.kind == Kind.SEND:
        return rank in (item.ranks[item.root], item.ranks[(item.root + 1) % len(item.ranks)])
    return rank in item.ranks


def run_program(
    engine: Engine, program: Program, groups: dict[tuple[int, ...], int], timeout: float = 30.0
) -> list[Any]:
    """This rank's results: by step, by bundle, by item: None, or (output, received splits)."""
    results = []
    for step in range(program.steps):
        handles: dict[int, list[int]] = {}
        for index in program.order(engine.rank, step, 0):
            items = [item for item in program.bundles[index] if takes_part(item, engine.rank)]
            requests = [request_of(item, engine.rank, groups[item.ranks], step) for item in items]
            handles[index] = engine.submit(requests, bundle=len(items) > 1) if items else []
        outputs: list[Any] = [None] * len(program.bundles)
        for index in program.order(engine.rank, step, 1):
            outcomes = [engine.wait(handle, timeout) for handle in handles[index]]
            outputs[index] = [(outcome.output, outcome.splits) for outcome in outcomes]
        results.append(outputs)
    return results


# --- The check -------------------------------------------------------------------------------------------------------


def check_program(program: Program, results: Sequence[list[Any]], hosts: Sequence[int], ring: bool) -> None:
    """results[rank] is what run_program gave."""
    for step in range(program.steps):
        for index, bundle in enumerate(program.bundles):
            for place, item in enumerate(bundle):
                got = {
                    m: results[rank][step][index][place] for m, rank in enumerate(item.ranks) if takes_part(item, rank)
                }
                check_item(item, step, got, [hosts[rank] for rank in item.ranks], ring)


def check_item(item: Item, step: int, got: dict[int, Any], hosts: Sequence[int], ring: bool) -> None:
    inputs = [input_of(item, member, step) for member in range(len(item.ranks))]
    if item.kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER):
        check_reduction(item, inputs, {member: output for member, (output, _) in got.items()}, hosts, ring)
    for member, (output, splits) in got.items():
        if item.kind == Kind.ALLGATHER:
            same(output, np.concatenate(inputs), item)
        elif item.kind == Kind.BROADCAST:
            same(output, inputs[item.root], item)
        elif item.kind == Kind.SEND and member == item.root:
            same(output, inputs[(item.root + 1) % len(item.ranks)], item)
        elif item.kind == Kind.ALLTOALL:
            starts = [sum(item.splits[sender][:member]) for sender in range(len(inputs))]
            counts = [item.splits[sender][member] for sender in range(len(inputs))]
            same(output, np.concatenate([x[s : s + c] for x, s, c in zip(inputs, starts, counts, strict=True)]), item)
            assert list(splits) == counts, item


def same(found: Array | None, expected: Array, item: Item) -> None:
    """The same shape, type and bits."""
    assert found is not None and found.shape == expected.shape, (item, found, expected.shape)
    assert found.dtype == expected.dtype, (item, found.dtype)
    if found.tobytes() != expected.tobytes():
        different = np.flatnonzero(np.ravel(found) != np.ravel(expected))
        where = different[:5]
        raise AssertionError(
            f"{item}: {len(different)} of {found.size} elements differ, first at {list(where)}: "
            f"{list(np.ravel(found)[where])}, not {list(np.ravel(expected)[where])}"
        )


def check_reduction(item: Item, inputs: list[Array], got: dict[int, Array], hosts: Sequence[int], ring: bool) -> None:
    size = len(inputs)
    flat = [np.ravel(x) for x in inputs]
    if item.kind == Kind.REDUCESCATTER:
        whole = np.concatenate([got[member] for member in range(size)])
        assert whole.shape == inputs[0].shape, item
        for member in range(size):
            assert got[member].shape == inputs[0][spec.share_of(member, len(inputs[0]), size)].shape, item
    else:
        whole = got[0]
        for member in got:  # the same bits on all ranks, always
            same(got[member], whole, item)
    bucket = {"dtype": item.dtype, "op": item.op, "prescale": item.prescale, "postscale": item.postscale}
    if item.op == ReduceOp.ADASUM:
        close(whole, adasum_of(flat, bucket), item, 8.0)
        return
    # The specification: equal bits, except for the ring, whose order of additions depends on the position.
    if (
        item.dtype not in FLOATS
        or not (ring and item.kind == Kind.ALLREDUCE)
        or item.op in (ReduceOp.MIN, ReduceOp.MAX)
    ):
        same(whole, spec.ordered_reduce(flat, hosts, bucket).reshape(inputs[0].shape), item)
    check_against_numpy(item, flat, whole)


def check_against_numpy(item: Item, flat: list[Array], whole: Array) -> None:
    """The second oracle is independent of the first: double precision for floats, Python's integers for the others."""
    size = len(flat)
    divisor = size if item.op == ReduceOp.AVERAGE else 1
    if item.dtype in FLOATS:
        wide = np.array([spec.widen(x, item.dtype) for x in flat], np.float64) * item.prescale
        magnitude = np.abs(wide).sum(axis=0)
        reductions: dict[ReduceOp, Any] = {
            ReduceOp.MIN: wide.min,
            ReduceOp.MAX: wide.max,
            ReduceOp.PRODUCT: wide.prod,
        }
        expected = reductions.get(item.op, wide.sum)(0)
        close(whole, expected * (item.postscale / divisor), item, 2.0 * size, magnitude * abs(item.postscale / divisor))
    elif item.prescale == item.postscale == 1.0 and item.dtype != DType.BOOL:
        exact = np.array([[int(v) for v in x] for x in flat], object)
        combine: dict[ReduceOp, Any] = {
            ReduceOp.MIN: np.minimum,
            ReduceOp.MAX: np.maximum,
            ReduceOp.PRODUCT: np.multiply,
        }
        total = combine.get(item.op, np.add).reduce(exact, axis=0)
        ends = np.iinfo(STORAGE[item.dtype])
        span = int(ends.max) - int(ends.min) + 1
        wrapped = [(int(v) - int(ends.min)) % span + int(ends.min) for v in total]
        divided = [abs(v) // divisor * (1 if v >= 0 else -1) for v in wrapped]
        assert [int(v) for v in np.ravel(whole)] == divided, item
    elif item.dtype == DType.BOOL and item.prescale == item.postscale == 1.0 and item.op != ReduceOp.AVERAGE:
        together: Any = np.logical_or if item.op in (ReduceOp.SUM, ReduceOp.MAX) else np.logical_and
        assert np.array_equal(np.ravel(whole), together.reduce(np.array(flat), axis=0)), item


def adasum_of(flat: list[Array], bucket: dict[str, Any]) -> Array:
    """The definition as a recursion over all members at once, in double precision."""
    wide = [spec.widen(x, bucket["dtype"]).astype(np.float64) * bucket["prescale"] for x in flat]
    power = 1 << (len(wide).bit_length() - 1)
    for extra in range(power, len(wide)):
        wide[extra - power] = spec.adasum_pair(wide[extra - power], wide[extra], DType.FLOAT64)
    level = wide[:power]
    while len(level) > 1:
        level = [spec.adasum_pair(level[i], level[i + 1], DType.FLOAT64) for i in range(0, len(level), 2)]
    result: Array = level[0] * bucket["postscale"]
    return result


EPSILON = {DType.FLOAT16: 2.0**-10, DType.BFLOAT16: 2.0**-7, DType.FLOAT32: 2.0**-23, DType.FLOAT64: 2.0**-52}


def close(found: Array, expected: Array, item: Item, factor: float, magnitude: Array | None = None) -> None:
    wide = np.ravel(spec.widen(found, item.dtype)).astype(np.float64)
    expected = np.ravel(expected)
    scale = np.abs(expected) if magnitude is None else np.maximum(magnitude, np.abs(expected))
    # Adasum's weights depend on whole vectors: their error is relative to the largest element.
    scale = np.full_like(scale, scale.max(initial=0.0)) if item.op == ReduceOp.ADASUM else scale
    limit = factor * EPSILON[item.dtype] * (scale + 1e-3)
    worst = np.flatnonzero(np.abs(wide - expected) > limit)[:3]
    assert worst.size == 0, f"{item}: at {worst}: {wide[worst]}, not {expected[worst]} +- {limit[worst]}"


# --- Strategies ------------------------------------------------------------------------------------------------------

ROWS = st.one_of(st.sampled_from([0, 1, 2, 3, 7]), st.integers(0, 40))
COUNTS = st.one_of(st.sampled_from([0, 1, 3, 1023, 1024, 4097]), st.integers(0, 300), st.integers(5_000, 70_000))


@st.composite
def items(draw: st.DrawFn, groups: Sequence[tuple[int, ...]], name: str | None, kinds: Sequence[Kind]) -> Item:
    ranks = draw(st.sampled_from(groups))
    size = len(ranks)
    kind = draw(st.sampled_from([kind for kind in kinds if kind != Kind.SEND or size > 1]))
    dtype = draw(st.sampled_from(list(DType)))
    ops = [ReduceOp.SUM, ReduceOp.AVERAGE][: 1 if dtype == DType.BOOL else 2]
    if kind != Kind.REDUCESCATTER:
        ops += [ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT, *([ReduceOp.ADASUM] if dtype in FLOATS else [])]
    op = draw(st.sampled_from(ops))
    tail = tuple(draw(st.lists(st.integers(0, 4), max_size=2)))
    if kind in (Kind.ALLREDUCE, Kind.BROADCAST, Kind.SEND):
        shape = draw(st.sampled_from([(), (draw(COUNTS),), (draw(ROWS), *tail)]))
    else:
        shape = (draw(ROWS), *tail)
    per_member = st.tuples(*[st.integers(0, 9)] * size)
    scales = st.sampled_from([1.0, 1.0, 0.5, 3.0, 1 / 3]) if op != ReduceOp.PRODUCT else st.just(1.0)
    return Item(
        kind, name, ranks, dtype, op if kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER) else ReduceOp.SUM, shape,
        first_dims=draw(st.tuples(*[ROWS] * size)) if kind == Kind.ALLGATHER else (),
        splits=tuple(draw(per_member) for _ in ranks) if kind == Kind.ALLTOALL else (),
        root=draw(st.integers(0, size - 1)),
        prescale=draw(scales), postscale=draw(scales),
        in_place=draw(st.booleans()), seed=draw(st.integers(0, 1 << 30)),
    )  # fmt: skip


@st.composite
def programs(draw: st.DrawFn, groups: Sequence[tuple[int, ...]], barriers: bool = True) -> Program:
    kinds = [kind for kind in KINDS if barriers or kind != Kind.BARRIER]
    named = draw(st.booleans()) or draw(st.booleans())
    bundles = []
    for index in range(draw(st.integers(1, 5))):
        if named and draw(st.integers(0, 3)) == 0:
            ranks = draw(st.sampled_from(groups))
            kind = draw(st.sampled_from([Kind.ALLREDUCE, Kind.ALLGATHER, Kind.REDUCESCATTER]))
            parts = range(draw(st.integers(2, 4)))
            bundles.append(tuple(draw(items([ranks], f"t{index}.{part}", [kind])) for part in parts))
        else:
            bundles.append((draw(items(groups, f"t{index}" if named else None, kinds)),))
    return Program(tuple(bundles), draw(st.integers(1, 3)), draw(st.integers(0, 1 << 30)) if named else None)
