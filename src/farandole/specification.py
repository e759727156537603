# The specification: what every operation means, to the last bit. Pure functions, meant to be read.
# Touches engine.py, errors.py and NumPy.
"""The first half of the Python engine (reference.py is the second). Read it from top to bottom:

1. arithmetic: what a reduction is, to the last bit;
2. collectives: who sends what to whom;
3. the coordinator: which requests are ready on all members, and whether they agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import errors
from .engine import FLOATING, STORAGE, Array, DType, Kind, ReduceOp, Request

Asked = dict[str, Any]  # one member's request, as it travels (ReferenceEngine.describe)
Bucket = dict[str, Any]  # what all members run next (Coordinator.bucket)

# --- 1. Arithmetic ---------------------------------------------------------------------------------------------------


def smaller(a: Array, b: Array) -> Array:
    """The minimum; NaN wins, and -0.0 is below 0.0, so that the order does not matter."""
    least = np.minimum(a, b)
    return np.where((a == 0) & (b == 0), -(-a + -b), least) if a.dtype.kind == "f" else least


def larger(a: Array, b: Array) -> Array:
    """The maximum, likewise."""
    most = np.maximum(a, b)
    return np.where((a == 0) & (b == 0), a + b, most) if a.dtype.kind == "f" else most


COMBINE: dict[ReduceOp, Callable[[Array, Array], Array]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVERAGE: np.add,  # the divisor comes at the end
    ReduceOp.MIN: smaller,
    ReduceOp.MAX: larger,
    ReduceOp.PRODUCT: np.multiply,
}


def widen(values: Array, dtype: DType) -> Array:
    """The values in the type they are accumulated in: fp32 for the 16-bit floats, else their own."""
    if dtype == DType.BFLOAT16:
        bits: Array = values.astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32)
    return values.astype(np.float32) if dtype == DType.FLOAT16 else values


def narrow(values: Array, dtype: DType) -> Array:
    """Back to the storage type, rounded to nearest even. There is one NaN: positive, quiet, without payload."""
    if dtype in FLOATING:
        values = np.where(np.isnan(values), values.dtype.type(np.nan), values)
    if dtype != DType.BFLOAT16:
        return values.astype(STORAGE[dtype])
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded: Array = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    return rounded.astype(np.uint16)


def truncate(values: Array, dtype: DType) -> Array:
    """Floating values as integers: towards zero, out of range to the nearest end, NaN to 0."""
    ends = np.iinfo(STORAGE[dtype])
    inside = (values > float(ends.min)) & (values < float(ends.max))  # NaN is not inside
    whole: Array = np.where(inside, values, 0.0).astype(STORAGE[dtype])
    whole[values >= float(ends.max)] = ends.max
    whole[values <= float(ends.min)] = ends.min
    return whole


def scale(values: Array, dtype: DType, factor: float) -> Array:
    """values * factor in the accumulator's type; integer products are truncated, truth values stay as they are."""
    if factor == 1.0 or dtype == DType.BOOL:
        return values
    if dtype in FLOATING:
        return np.asarray(values * values.dtype.type(factor))
    return truncate(values.astype(np.float64) * factor, dtype)


def finish(total: Array, dtype: DType, postscale: float, divisor: int) -> Array:
    """total * postscale / divisor; for integers in integer arithmetic where that is possible."""
    if dtype in FLOATING:
        return scale(total, dtype, postscale / divisor)
    if dtype == DType.BOOL:
        return total
    if postscale != 1.0:
        return truncate(total.astype(np.float64) * postscale / divisor, dtype)
    wide: Array = total.astype(np.int64)
    quotient: Array = wide // divisor + ((wide < 0) & (wide % divisor != 0))  # "//" rounds down, not to zero
    return quotient.astype(total.dtype)


def reduce(
    sources: Sequence[Array],
    dtype: DType,
    op: ReduceOp,
    prescale: float = 1.0,
    postscale: float = 1.0,
    divisor: int = 1,
) -> Array:
    """Combines the sources from the left and rounds once. For bool a sum is "or" and a product "and"."""
    with np.errstate(all="ignore"):  # integers wrap around, floats overflow to infinity: that is the definition
        total = scale(widen(sources[0], dtype), dtype, prescale)
        for source in sources[1:]:
            total = COMBINE[op](total, scale(widen(source, dtype), dtype, prescale))
        return narrow(finish(total, dtype, postscale, divisor), dtype)


def ordered_reduce(contributions: Sequence[Array], hosts: Sequence[int], bucket: Bucket) -> Array:
    """The definition behind "same bits": each host's members in order, then the hosts in order."""
    dtype, op = DType(bucket["dtype"]), ReduceOp(bucket["op"])
    divisor = len(contributions) if op == ReduceOp.AVERAGE else 1
    by_host: dict[int, list[Array]] = {host: [] for host in sorted(set(hosts))}
    for host, contribution in zip(hosts, contributions, strict=True):
        by_host[host].append(contribution)
    parts = list(by_host.values())
    if len(parts) == 1:
        return reduce(parts[0], dtype, op, bucket["prescale"], bucket["postscale"], divisor)
    partials = [reduce(part, dtype, op, bucket["prescale"]) for part in parts]
    return reduce(partials, dtype, op, 1.0, bucket["postscale"], divisor)


def adasum_pair(a: Array, b: Array, dtype: DType) -> Array:
    """a (1 - a.b / 2|a|^2) + b (1 - a.b / 2|b|^2): orthogonal gradients are added, parallel ones averaged."""
    x, y = widen(a, dtype).astype(np.float64), widen(b, dtype).astype(np.float64)
    ab, aa, bb = float(x @ y), float(x @ x), float(y @ y)
    tiny = float(np.finfo(np.float64).tiny)
    weight_a = 1.0 if aa < tiny else 1.0 - ab / aa * 0.5
    weight_b = 1.0 if bb < tiny else 1.0 - ab / bb * 0.5
    return narrow(x * weight_a + y * weight_b, dtype)


# --- 2. Collectives --------------------------------------------------------------------------------------------------


@dataclass
class Circle:
    """A group as one collective sees it: members 0..size-1. Messages between two members arrive in order."""

    me: int
    hosts: Sequence[int]  # by member
    send: Callable[[int, bytes], None]  # never blocks
    receive: Callable[[int], bytes]  # blocks; raises when that member is lost

    @property
    def size(self) -> int:
        return len(self.hosts)

    def exchange(self, outgoing: Sequence[bytes]) -> list[bytes]:
        """outgoing[m] goes to member m; the answer has what each member sent here. N-1 messages each way."""
        for member, data in enumerate(outgoing):
            if member != self.me:
                self.send(member, data)
        return [outgoing[m] if m == self.me else self.receive(m) for m in range(self.size)]


def allreduce(circle: Circle, values: Array, bucket: Bucket, algorithm: str) -> Array:
    """The same reduction on every member."""
    if bucket["op"] == ReduceOp.ADASUM:
        return adasum(circle, values, bucket)
    if algorithm == "ring":
        return ring_allreduce(circle, values, bucket)
    everything = circle.exchange([values.tobytes()] * circle.size)
    return ordered_reduce([np.frombuffer(data, values.dtype) for data in everything], circle.hosts, bucket)


def ring_allreduce(circle: Circle, values: Array, bucket: Bucket) -> Array:
    """The textbook ring: 2(N-1) steps, in each of which every member sends one Nth to its right neighbour.

    First partial sums travel: after N-1 steps member m holds the complete chunk m+1. Then the complete chunks travel.
    """
    dtype, op, size, me = DType(bucket["dtype"]), ReduceOp(bucket["op"]), circle.size, circle.me
    right, left = (me + 1) % size, (me - 1) % size
    chunks = np.array_split(reduce([values], dtype, op, bucket["prescale"]), size)
    for step in range(size - 1):
        circle.send(right, chunks[(me - step) % size].tobytes())
        target = (me - step - 1) % size
        chunks[target] = reduce([np.frombuffer(circle.receive(left), values.dtype), chunks[target]], dtype, op)
    divisor = size if op == ReduceOp.AVERAGE else 1
    chunks[right] = reduce([chunks[right]], dtype, op, 1.0, bucket["postscale"], divisor)
    for step in range(size - 1):
        circle.send(right, chunks[(me + 1 - step) % size].tobytes())
        chunks[(me - step) % size] = np.frombuffer(circle.receive(left), values.dtype)
    return np.concatenate(chunks)


def adasum(circle: Circle, values: Array, bucket: Bucket) -> Array:
    """Pairs at distance 1, 2, 4 ... With P the largest power of two <= N, members r >= P are folded into r-P first."""
    dtype, size, me = DType(bucket["dtype"]), circle.size, circle.me
    mine = reduce([values], dtype, ReduceOp.SUM, bucket["prescale"])
    power = 1 << (size.bit_length() - 1)
    if me >= power:
        circle.send(me - power, mine.tobytes())
        return np.frombuffer(circle.receive(me - power), values.dtype)
    if me + power < size:
        mine = adasum_pair(mine, np.frombuffer(circle.receive(me + power), values.dtype), dtype)
    level = 1
    while level < power:
        circle.send(me ^ level, mine.tobytes())
        other = np.frombuffer(circle.receive(me ^ level), values.dtype)
        mine = adasum_pair(mine, other, dtype) if me < me ^ level else adasum_pair(other, mine, dtype)
        level *= 2
    mine = reduce([mine], dtype, ReduceOp.SUM, 1.0, bucket["postscale"])
    if me + power < size:
        circle.send(me + power, mine.tobytes())
    return mine


def allgather(circle: Circle, rows: Array, first_dims: Sequence[int]) -> Array:
    """Everyone's rows, in the order of the members."""
    everything = circle.exchange([rows.tobytes()] * circle.size)
    return np.frombuffer(b"".join(everything), rows.dtype).reshape(sum(first_dims), *rows.shape[1:])


def broadcast(circle: Circle, values: Array, root: int) -> Array:
    """The root sends to everyone else."""
    if circle.me != root:
        return np.frombuffer(circle.receive(root), values.dtype)
    for member in range(circle.size):
        if member != root:
            circle.send(member, values.tobytes())
    return values


def alltoall(circle: Circle, rows: Array, splits: Sequence[Sequence[int]]) -> Array:
    """splits[s][r] rows go from member s to member r; what arrives is put together in the order of the senders."""
    ends = [sum(splits[circle.me][: member + 1]) for member in range(circle.size)]
    parts = [rows[end - count : end] for end, count in zip(ends, splits[circle.me], strict=True)]
    arrived = circle.exchange([part.tobytes() for part in parts])
    count = sum(row[circle.me] for row in splits)
    return np.frombuffer(b"".join(arrived), rows.dtype).reshape(count, *rows.shape[1:])


def share_of(member: int, rows: int, size: int) -> slice:
    """reducescatter's share: the first `rows % size` members get one row more."""
    share, extra = divmod(rows, size)
    begin = member * share + min(member, extra)
    return slice(begin, begin + share + (member < extra))


def reducescatter(circle: Circle, rows: Array, bucket: Bucket) -> Array:
    """Every member receives all contributions to its rows, and reduces them."""
    shares = [rows[share_of(member, len(rows), circle.size)] for member in range(circle.size)]
    arrived = circle.exchange([share.tobytes() for share in shares])
    flat = [np.frombuffer(data, rows.dtype) for data in arrived]
    return ordered_reduce(flat, circle.hosts, bucket).reshape(shares[circle.me].shape)


# --- 3. The coordinator: member 0 of each group ----------------------------------------------------------------------


def refusal(asked: Sequence[Asked], joined: bool) -> tuple[int, str] | None:
    """Why requests that are ready cannot be carried out: the code and the contract's message, for all members."""
    first, kind = asked[0], Kind(asked[0]["kind"])
    if message := disagreement(asked):
        return errors.PRECONDITION, message
    if kind in (Kind.ALLGATHER, Kind.ALLTOALL, Kind.REDUCESCATTER) and not first["shape"]:
        return errors.PRECONDITION, f"Process-set rank zero tried to {kind.name.lower()} a rank-zero tensor."
    if kind == Kind.REDUCESCATTER and first["op"] not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        return errors.ABORTED, "Reducescatter currently only supports Average and Sum."
    if joined and kind not in (Kind.ALLREDUCE, Kind.BARRIER):
        return errors.PRECONDITION, f"{kind.name.capitalize()} is not supported with Join at this time."
    return None


def disagreement(asked: Sequence[Asked]) -> str:
    """The contract's message for requests of one name that do not fit together, or an empty string."""
    first, kind = asked[0], Kind(asked[0]["kind"])
    rows_differ = kind in (Kind.ALLGATHER, Kind.ALLTOALL)
    for other in asked[1:]:
        if other["dtype"] != first["dtype"]:
            one, two = DType(first["dtype"]).name.lower(), DType(other["dtype"]).name.lower()
            return f"Mismatched data types: One rank had type {one}, but another rank had type {two}."
        if other["kind"] != kind:
            one, two = kind.name, Kind(other["kind"]).name
            return f"Mismatched operations: One rank did an {one}, but another rank did an {two}."
        shapes = [request["shape"][1:] if rows_differ else request["shape"] for request in (first, other)]
        if shapes[0] != shapes[1] or len(first["shape"]) != len(other["shape"]):
            what, verb, key = f"{kind.name} tensor shapes", "sent a tensor of shape", "shape"
        elif other["op"] != first["op"]:
            what, verb, key = "reduction operation", "specified", "op"
        elif other["prescale"] != first["prescale"]:
            what, verb, key = "prescale and/or postscale factors", "had", "prescale"
        elif other["postscale"] != first["postscale"]:
            what, verb, key = "prescale and/or postscale factors", "had", "postscale"
        elif other["root"] != first["root"]:
            what, verb, key = f"{kind.name} root ranks", "specified root rank", "root"
        elif other["device"] != first["device"]:
            what, verb, key = f"{kind.name} CPU/GPU device selection", "specified device", "device"
        elif kind in (Kind.ADD_GROUP, Kind.REMOVE_GROUP) and other["splits"] != first["splits"]:
            what, verb, key = "process sets", "gave", "splits"
        else:
            continue
        return f"Mismatched {what}: One rank {verb} {first[key]}, but another rank {verb} {other[key]}."
    return ""


class Coordinator:
    """Pure: requests go in, buckets come out in the order in which all members will run them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.pending: dict[str, dict[int, Asked]] = {}  # name -> member -> request
        self.joined: list[int] = []  # members, in the order they joined
        self.gone: tuple[int, str] | None = None  # code and message once a member has left

    def submit(self, member: int, asked: Asked) -> list[Bucket]:
        if asked["kind"] == Kind.JOIN:
            self.joined.append(member)
        else:
            self.pending.setdefault(asked["name"], {})[member] = asked
        return self.take_ready()

    def leave(self, code: int, message: str) -> list[Bucket]:
        """A member has left: whatever is not ready now never will be."""
        self.gone = (code, message)
        return self.take_ready()

    def take_ready(self) -> list[Bucket]:
        names = [name for name in self.pending if self.together(name)]
        buckets = [self.bucket(name, self.pending.pop(name)) for name in names]
        if len(self.joined) == self.size:
            buckets.append({"kind": Kind.JOIN, "name": "join", "error": None, "value": self.joined[-1]})
            self.joined = []
        if self.gone:
            buckets += [{"kind": Kind.BARRIER, "name": name, "error": self.gone} for name in [*self.pending, "join"]]
            self.pending = {}
        return buckets

    def complete(self, name: str) -> bool:
        return all(member in self.pending[name] or member in self.joined for member in range(self.size))

    def together(self, name: str) -> bool:
        """Complete, and so is every other tensor of its bundle."""
        bundle = next(iter(self.pending[name].values()))["bundle"] or [name]
        return all(part in self.pending and self.complete(part) for part in bundle)

    def bucket(self, name: str, by_member: dict[int, Asked]) -> Bucket:
        asked = [by_member[member] for member in sorted(by_member)]
        kind = Kind(asked[0]["kind"])
        refused = refusal(asked, bool(self.joined))
        if refused:
            refused = (refused[0], f"{refused[1]} Tensor {name!r}.")
        bucket = dict(asked[0], name=name, error=refused)
        bucket["first_dims"] = [request["shape"][0] if request["shape"] else 0 for request in asked]
        if kind == Kind.ALLTOALL:
            bucket["splits"] = [request["splits"] for request in asked]
        return bucket


def check(request: Request, ranks: Sequence[int] | None, rank: int) -> None:
    """What one rank can see by itself: ValueError before anything is sent. `ranks` are the group's."""
    kind, given, output = request.kind, request.input, request.output
    if ranks is None:
        raise ValueError(f"process set {request.group} is unknown")
    if rank not in ranks:
        raise ValueError(f"rank {rank} is not a member of process set {request.group} (ranks {list(ranks)})")
    if kind in (Kind.BARRIER, Kind.JOIN, Kind.ADD_GROUP, Kind.REMOVE_GROUP):
        if kind == Kind.JOIN and request.group != 0:
            raise ValueError("join works on the global process set alone")
        return
    if kind == Kind.TUNE:
        raise ValueError("the Python reference engine has nothing to tune")
    if (given if kind != Kind.RECEIVE else output) is None:
        raise ValueError(f"{kind.name} needs an array")
    for array in (given, output):
        if array is not None and not array.flags.c_contiguous:
            raise ValueError(f"{kind.name} needs C-contiguous arrays; use numpy.ascontiguousarray")
        if array is not None and STORAGE[request.elements()] != array.dtype and array.dtype.name != "bfloat16":
            raise ValueError(f"an array of {array.dtype} cannot hold {request.elements().name.lower()} elements")
    if kind in (Kind.SEND, Kind.RECEIVE, Kind.BROADCAST) and request.peer not in ranks:
        who = "root rank" if kind == Kind.BROADCAST else "peer"
        raise ValueError(f"{who} {request.peer} is not in process set {request.group} (ranks {list(ranks)})")
    if given is None or kind == Kind.SEND:
        return
    if request.op == ReduceOp.ADASUM and kind == Kind.ALLREDUCE and request.elements() not in FLOATING:
        raise ValueError(f"Adasum needs a floating-point type, not {request.elements().name.lower()}")
    if (
        request.op == ReduceOp.AVERAGE
        and kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER)
        and request.elements() == DType.BOOL
    ):
        raise ValueError("Average is not defined for bool.")
    if kind == Kind.ALLTOALL and given.ndim:
        check_splits(request.splits, given.shape[0], len(ranks))
    if output is not None and kind in (Kind.ALLREDUCE, Kind.BROADCAST) and output.shape != given.shape:
        raise ValueError(f"the output has shape {output.shape}, but the input {given.shape}")


def check_splits(splits: Sequence[int] | None, rows: int, members: int) -> None:
    if splits is None:
        if rows % members:
            raise ValueError(f"alltoall without splits: {rows} rows cannot be split evenly among {members} ranks")
    elif len(splits) != members or min(splits) < 0 or sum(splits) > rows:
        raise ValueError(f"alltoall splits {list(splits)}: needed are {members} counts >= 0 of together <= {rows} rows")
