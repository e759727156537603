# The specification: the exact result of every operation. Pure functions, written to be read.
# Touches interface.py, errors.py and NumPy.
"""The first half of the Python engine (reference.py is the second). Read it from top to bottom:

1. arithmetic: the exact result of a reduction;
2. collectives: which member sends what to which;
3. the coordinator: which requests are ready on all members, and whether they match.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..base import errors
from .interface import FLOATING, STORAGE, Array, DType, Kind, ReduceOp, Request

RequestData = dict[str, Any]  # one member's request as it is sent (ReferenceEngine.describe)
Bucket = dict[str, Any]  # what all members run next (Coordinator.bucket)

# --- 1. Arithmetic ---------------------------------------------------------------------------------------------------


def smaller(a: Array, b: Array) -> Array:
    """The minimum. NaN wins and -0.0 is below 0.0, so the order of the arguments does not matter."""
    least = np.minimum(a, b)
    return np.where((a == 0) & (b == 0), -(-a + -b), least) if a.dtype.kind == "f" else least


def larger(a: Array, b: Array) -> Array:
    """The maximum, with the same rules."""
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
    """The values in the type of the accumulator: fp32 for 16-bit floats, otherwise their own type."""
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
class Communicator:
    """A group as a collective uses it: members 0..size-1. Messages between two members arrive in order."""

    me: int
    hosts: Sequence[int]  # by member
    send: Callable[[int, bytes], None]  # never blocks
    receive: Callable[[int], bytes]  # blocks; raises when that member is lost

    @property
    def size(self) -> int:
        return len(self.hosts)

    def exchange(self, outgoing: Sequence[bytes]) -> list[bytes]:
        """Sends outgoing[m] to member m and returns what each member sent here. N-1 messages each way."""
        for member, data in enumerate(outgoing):
            if member != self.me:
                self.send(member, data)
        return [outgoing[m] if m == self.me else self.receive(m) for m in range(self.size)]


def allreduce(comm: Communicator, values: Array, bucket: Bucket, algorithm: str) -> Array:
    """The same reduction on every member."""
    if bucket["op"] == ReduceOp.ADASUM:
        return adasum(comm, values, bucket)
    if algorithm == "ring":
        return ring_allreduce(comm, values, bucket)
    everything = comm.exchange([values.tobytes()] * comm.size)
    return ordered_reduce([np.frombuffer(data, values.dtype) for data in everything], comm.hosts, bucket)


def ring_allreduce(comm: Communicator, values: Array, bucket: Bucket) -> Array:
    """The textbook ring: 2(N-1) steps; in each step every member sends one Nth to its right neighbour.

    First the members send partial sums: after N-1 steps member m holds the complete chunk m+1. Then they send the
    complete chunks.
    """
    dtype, op, size, me = DType(bucket["dtype"]), ReduceOp(bucket["op"]), comm.size, comm.me
    right, left = (me + 1) % size, (me - 1) % size
    chunks = np.array_split(reduce([values], dtype, op, bucket["prescale"]), size)
    for step in range(size - 1):
        comm.send(right, chunks[(me - step) % size].tobytes())
        target = (me - step - 1) % size
        chunks[target] = reduce([np.frombuffer(comm.receive(left), values.dtype), chunks[target]], dtype, op)
    divisor = size if op == ReduceOp.AVERAGE else 1
    chunks[right] = reduce([chunks[right]], dtype, op, 1.0, bucket["postscale"], divisor)
    for step in range(size - 1):
        comm.send(right, chunks[(me + 1 - step) % size].tobytes())
        chunks[(me - step) % size] = np.frombuffer(comm.receive(left), values.dtype)
    return np.concatenate(chunks)


def adasum(comm: Communicator, values: Array, bucket: Bucket) -> Array:
    """Pairs at distance 1, 2, 4 ... With P the largest power of two <= N, members r >= P are folded into r-P first."""
    dtype, size, me = DType(bucket["dtype"]), comm.size, comm.me
    result = reduce([values], dtype, ReduceOp.SUM, bucket["prescale"])
    power = 1 << (size.bit_length() - 1)
    if me >= power:
        comm.send(me - power, result.tobytes())
        return np.frombuffer(comm.receive(me - power), values.dtype)
    if me + power < size:
        result = adasum_pair(result, np.frombuffer(comm.receive(me + power), values.dtype), dtype)
    level = 1
    while level < power:
        comm.send(me ^ level, result.tobytes())
        other = np.frombuffer(comm.receive(me ^ level), values.dtype)
        result = adasum_pair(result, other, dtype) if me < me ^ level else adasum_pair(other, result, dtype)
        level *= 2
    result = reduce([result], dtype, ReduceOp.SUM, 1.0, bucket["postscale"])
    if me + power < size:
        comm.send(me + power, result.tobytes())
    return result


def allgather(comm: Communicator, rows: Array, first_dims: Sequence[int]) -> Array:
    """The rows of all members, in their order."""
    everything = comm.exchange([rows.tobytes()] * comm.size)
    return np.frombuffer(b"".join(everything), rows.dtype).reshape(sum(first_dims), *rows.shape[1:])


def broadcast(comm: Communicator, values: Array, root: int) -> Array:
    """The root sends to all other members."""
    if comm.me != root:
        return np.frombuffer(comm.receive(root), values.dtype)
    for member in range(comm.size):
        if member != root:
            comm.send(member, values.tobytes())
    return values


def alltoall(comm: Communicator, rows: Array, splits: Sequence[Sequence[int]]) -> Array:
    """Member s sends splits[s][r] rows to member r; each member joins the rows in the order of the senders."""
    ends = [sum(splits[comm.me][: member + 1]) for member in range(comm.size)]
    parts = [rows[end - count : end] for end, count in zip(ends, splits[comm.me], strict=True)]
    arrived = comm.exchange([part.tobytes() for part in parts])
    count = sum(row[comm.me] for row in splits)
    return np.frombuffer(b"".join(arrived), rows.dtype).reshape(count, *rows.shape[1:])


def share_of(member: int, rows: int, size: int) -> slice:
    """reducescatter's share: the first `rows % size` members get one row more."""
    share, extra = divmod(rows, size)
    begin = member * share + min(member, extra)
    return slice(begin, begin + share + (member < extra))


def reducescatter(comm: Communicator, rows: Array, bucket: Bucket) -> Array:
    """Every member receives all contributions to its rows and reduces them."""
    shares = [rows[share_of(member, len(rows), comm.size)] for member in range(comm.size)]
    arrived = comm.exchange([share.tobytes() for share in shares])
    flat = [np.frombuffer(data, rows.dtype) for data in arrived]
    return ordered_reduce(flat, comm.hosts, bucket).reshape(shares[comm.me].shape)


def run_collective(comm: Communicator, values: Array, bucket: Bucket, algorithm: str, ranks: Sequence[int]) -> Array:
    """This member's result of the bucket's collective; `ranks` has the rank of each member."""
    kind = Kind(bucket["kind"])
    if kind == Kind.ALLREDUCE:
        return allreduce(comm, values.reshape(-1), bucket, algorithm).reshape(values.shape)
    if kind == Kind.ALLGATHER:
        return allgather(comm, values, bucket["first_dims"])
    if kind == Kind.BROADCAST:
        return broadcast(comm, values.reshape(-1), ranks.index(bucket["root"])).reshape(values.shape)
    if kind == Kind.ALLTOALL:
        return alltoall(comm, values, bucket["splits"])
    return reducescatter(comm, values, bucket)


# --- 3. The coordinator: member 0 of each group ----------------------------------------------------------------------


def rejection(asked: Sequence[RequestData], joined: bool) -> tuple[int, str] | None:
    """Why ready requests cannot run: the code and the contract's message, for all members."""
    first, kind = asked[0], Kind(asked[0]["kind"])
    if message := mismatch(asked):
        return errors.PRECONDITION, message
    if kind in (Kind.ALLGATHER, Kind.ALLTOALL, Kind.REDUCESCATTER) and not first["shape"]:
        return errors.PRECONDITION, f"Process-set rank zero tried to {kind.name.lower()} a rank-zero tensor."
    if kind == Kind.REDUCESCATTER and first["op"] not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        return errors.ABORTED, "Reducescatter currently only supports Average and Sum."
    if joined and kind not in (Kind.ALLREDUCE, Kind.BARRIER):
        return errors.PRECONDITION, f"{kind.name.capitalize()} is not supported with Join at this time."
    return None


def mismatch(asked: Sequence[RequestData]) -> str:
    """The contract's message for requests of one name that do not match, or an empty string."""
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
    """Pure: takes requests and returns buckets in the order in which all members run them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.pending: dict[str, dict[int, RequestData]] = {}  # name -> member -> request
        self.joined: list[int] = []  # members, in the order they joined
        self.gone: tuple[int, str] | None = None  # code and message, after a member has left

    def submit(self, member: int, asked: RequestData) -> list[Bucket]:
        if asked["kind"] == Kind.JOIN:
            self.joined.append(member)
        else:
            self.pending.setdefault(asked["name"], {})[member] = asked
        return self.take_ready()

    def leave(self, code: int, message: str) -> list[Bucket]:
        """A member has left: requests that are not ready now will never be."""
        self.gone = (code, message)
        return self.take_ready()

    def take_ready(self) -> list[Bucket]:
        names = [name for name in self.pending if self.bundle_complete(name)]
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

    def bundle_complete(self, name: str) -> bool:
        """Whether this tensor and every other one of its bundle are complete."""
        bundle = next(iter(self.pending[name].values()))["bundle"] or [name]
        return all(part in self.pending and self.complete(part) for part in bundle)

    def bucket(self, name: str, by_member: dict[int, RequestData]) -> Bucket:
        asked = [by_member[member] for member in sorted(by_member)]
        kind = Kind(asked[0]["kind"])
        refused = rejection(asked, bool(self.joined))
        if refused:
            refused = (refused[0], f"{refused[1]} Tensor {name!r}.")
        bucket = dict(asked[0], name=name, error=refused)
        bucket["first_dims"] = [request["shape"][0] if request["shape"] else 0 for request in asked]
        if kind == Kind.ALLTOALL:
            bucket["splits"] = [request["splits"] for request in asked]
        return bucket


def check(request: Request, ranks: Sequence[int] | None, rank: int) -> None:
    """Checks what one rank can check alone: ValueError before anything is sent. `ranks`: those of the group."""
    kind, array, output = request.kind, request.input, request.output
    if ranks is None:
        raise ValueError(f"process set {request.group} is unknown")
    if rank not in ranks:
        raise ValueError(f"rank {rank} is not a member of process set {request.group} (ranks {list(ranks)})")
    if kind in (Kind.BARRIER, Kind.JOIN, Kind.ADD_GROUP, Kind.REMOVE_GROUP):
        if kind == Kind.JOIN and request.group != 0:
            raise ValueError("join works only on the global process set")
        return
    if kind == Kind.TUNE:
        raise ValueError("the Python reference engine has nothing to tune")
    if (array if kind != Kind.RECEIVE else output) is None:
        raise ValueError(f"{kind.name} needs an array")
    for one in (array, output):
        if one is not None and not one.flags.c_contiguous:
            raise ValueError(f"{kind.name} needs C-contiguous arrays; use numpy.ascontiguousarray")
        if one is not None and STORAGE[request.elements()] != one.dtype and one.dtype.name != "bfloat16":
            raise ValueError(f"an array of {one.dtype} cannot hold {request.elements().name.lower()} elements")
    if kind in (Kind.SEND, Kind.RECEIVE, Kind.BROADCAST) and request.peer not in ranks:
        who = "root rank" if kind == Kind.BROADCAST else "peer"
        raise ValueError(f"{who} {request.peer} is not in process set {request.group} (ranks {list(ranks)})")
    if array is None or kind == Kind.SEND:
        return
    if request.op == ReduceOp.ADASUM and kind == Kind.ALLREDUCE and request.elements() not in FLOATING:
        raise ValueError(f"Adasum needs a floating-point type, not {request.elements().name.lower()}")
    if (
        request.op == ReduceOp.AVERAGE
        and kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER)
        and request.elements() == DType.BOOL
    ):
        raise ValueError("Average is not defined for bool.")
    if kind == Kind.ALLTOALL and array.ndim:
        check_splits(request.splits, array.shape[0], len(ranks))
    if output is not None and kind in (Kind.ALLREDUCE, Kind.BROADCAST) and output.shape != array.shape:
        raise ValueError(f"the output has shape {output.shape}, but the input {array.shape}")


def check_splits(splits: Sequence[int] | None, rows: int, members: int) -> None:
    if splits is None:
        if rows % members:
            raise ValueError(f"alltoall without splits: {rows} rows cannot be split evenly among {members} ranks")
    elif len(splits) != members or min(splits) < 0 or sum(splits) > rows:
        raise ValueError(
            f"alltoall splits {list(splits)}: expected {members} counts of at least 0, together at most {rows}"
        )
