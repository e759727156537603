# What an engine is: requests go in, outcomes come out. Both engines (native.py, reference.py) speak these words.
# Touches NumPy alone.
"""The vocabulary between the operations that users call and the engine that carries them out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Kind(IntEnum):
    """The operations a rank can ask for; the numbers are those of the core."""

    ALLREDUCE = 0
    ALLGATHER = 1
    BROADCAST = 2
    ALLTOALL = 3
    REDUCESCATTER = 4
    BARRIER = 5
    JOIN = 6
    ADD_GROUP = 7
    REMOVE_GROUP = 8
    SEND = 9
    RECEIVE = 10
    TUNE = 11  # of rank 0 alone


ROWS_VARY = (Kind.ALLGATHER, Kind.ALLTOALL)  # the sizes of their results depend on all ranks


class DType(IntEnum):
    """Element types; the numbers are those of the core, the lower-case names are NumPy's."""

    BOOL = 0
    UINT8 = 1
    INT8 = 2
    UINT16 = 3
    INT16 = 4
    INT32 = 5
    INT64 = 6
    FLOAT16 = 7
    FLOAT32 = 8
    FLOAT64 = 9
    BFLOAT16 = 10


class ReduceOp(IntEnum):
    """Reductions, with Horovod's numbers."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


# NumPy has no bfloat16: such elements travel in uint16 arrays, and only the request's dtype knows.
STORAGE: dict[DType, np.dtype[Any]] = {
    DType.BOOL: np.dtype(np.bool_),
    DType.UINT8: np.dtype(np.uint8),
    DType.INT8: np.dtype(np.int8),
    DType.UINT16: np.dtype(np.uint16),
    DType.INT16: np.dtype(np.int16),
    DType.INT32: np.dtype(np.int32),
    DType.INT64: np.dtype(np.int64),
    DType.FLOAT16: np.dtype(np.float16),
    DType.FLOAT32: np.dtype(np.float32),
    DType.FLOAT64: np.dtype(np.float64),
    DType.BFLOAT16: np.dtype(np.uint16),
}

FLOATING = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64)

_BY_NUMPY: dict[np.dtype[Any], DType] = {dtype: key for key, dtype in STORAGE.items() if key != DType.BFLOAT16}


def dtype_of(array: Array) -> DType:
    """The element type of an array; ValueError lists the supported ones."""
    found = _BY_NUMPY.get(array.dtype)
    if found is not None:
        return found
    if array.dtype.name == "bfloat16":
        return DType.BFLOAT16
    supported = ", ".join(key.name.lower() for key in DType)
    raise ValueError(f"arrays of dtype {array.dtype} are not supported; supported are {supported}")


def _found_in(memory: Any) -> DType:
    """The element type that other memory than an array says; ValueError where it says none, as tensors of DLPack."""
    try:
        seen = memory if hasattr(memory, "__array_interface__") else memoryview(memory)
    except TypeError:
        raise ValueError(f"{type(memory).__name__} does not say what its elements are: say dtype=DType....") from None
    return dtype_of(np.asarray(seen))


# The order is that of the core (farandole_counter).
COUNTERS: tuple[str, ...] = (
    "bytes_sent",
    "bytes_received",
    "frames",
    "negotiated_buckets",
    "planned_buckets",
    "diverts",
    "in_place_bytes",
    "collectives",
    "wakeups",
    "steps",
    "step_ns",
    "step_bytes",
    "waited_ns",
)


class Span:
    """Contiguous memory of a framework's tensor, which it keeps alive; what a NumPy view of it would cost is saved."""

    __slots__ = ("address", "memory", "owner", "shape")

    def __init__(self, address: int, shape: tuple[int, ...], owner: Any, memory: Any) -> None:
        self.address = address
        self.shape = shape
        self.owner = owner  # the tensor
        self.memory = memory  # what keeps the bytes alive, whatever becomes of the tensor

    def array(self, dtype: DType) -> Array:
        """The view."""
        return np.asarray(_Interface(self, dtype))


class _Interface:
    def __init__(self, span: Span, dtype: DType) -> None:
        self.span = span
        self.__array_interface__ = {
            "version": 3,
            "data": (span.address, False),
            "shape": span.shape,
            "typestr": STORAGE[dtype].str,
        }


Memory: TypeAlias = Any  # an Array or a Span
Spans: TypeAlias = Callable[..., tuple[Span, Span | None]]


@dataclass(slots=True)
class Request:
    """One operation. Arrays are C-contiguous and stay untouched by the caller until the handle is done.

    `output` may be `input` itself (in place). Allgather and alltoall may leave it None: the engine allocates, as it
    does when the result has another size than `output`.
    """

    kind: Kind
    name: str | None = None  # None: paired across ranks by the order of calls per (group, kind)
    input: Memory = None
    output: Memory = None
    dtype: DType | None = None  # None: that of the input (or output) array; BFLOAT16 must be said, it lies in uint16
    op: ReduceOp = ReduceOp.SUM
    group: int = 0
    peer: int = -1  # broadcast: the root; send, receive: the other side. A rank in the job; receive: -1, anybody
    # alltoall: rows per member; add_group: count, ranks..., again; remove_group: the id; tune: the core's six values
    splits: Sequence[int] | None = None
    prescale: float = 1.0
    postscale: float = 1.0
    # add_group: 0, or a number from 1 << 20 that the members agree on, who alone ask for the group. remove_group: 0, or
    # of such a group 1 (this rank leaves it) or 2 (it ends on all its members, with an error).
    tag: int = 0
    # allreduce in place on memory in several places: rows of address and bytes. `input` keeps it all alive, and
    # has the shape of the whole. For engines that say `scatters`.
    pieces: NDArray[np.int64] | None = None
    device: int = -1  # where the user's tensor lies, -1: on the CPU. Ranks must agree; the memory is the CPU's anyhow

    def elements(self) -> DType:
        """The element type, said or found; uint8 where no memory is involved (barrier, join)."""
        if self.dtype is not None:
            return self.dtype
        memory = self.input if self.input is not None else self.output
        if isinstance(memory, np.ndarray):
            return dtype_of(memory)
        return DType.UINT8 if memory is None else _found_in(memory)

    def with_arrays(self) -> Request:
        """The same, with arrays where it has spans."""
        first, output = self.input, self.output
        seen = first.array(self.elements()) if isinstance(first, Span) else first
        if isinstance(output, Span):
            output = seen if output is first else output.array(self.elements())
        return replace(self, input=seen, output=output)


def with_memory(request: Request, first: Memory, output: Memory) -> Request:
    """The same on other memory."""
    return replace(request, input=first, output=output)


def array_over(memory: Any, shape: tuple[int, ...], dtype: int, copied: bool) -> Array:
    """An array over the bytes of `memory`, which it keeps; or a copy of them."""
    array: Array = np.ndarray(shape, STORAGE[DType(dtype)], memory)
    return array.copy() if copied else array


@dataclass(slots=True)
class Outcome:
    """What became of a request. bfloat16 results are uint16 arrays."""

    output: Memory = None
    splits: list[int] | None = None  # alltoall: rows received from each member
    value: int = 0  # join: the last rank; receive from anybody: who sent; add_group: the first new id (the rest follow)


class Engine(Protocol):
    """One rank's engine. Calls are safe from any thread; errors are those of errors.py, or ValueError."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def scatters(self) -> bool:
        """Whether requests may have pieces."""
        ...

    def submit(self, requests: Sequence[Request], bundle: bool = False, prompt: bool = False) -> list[int]:
        """Accepts all requests or none and gives their handles.

        With `bundle` they become ready together. `prompt` says that the caller waits for them at once.
        """
        ...

    def run(self, request: Request) -> Outcome:
        """Submits one request and waits for it."""
        ...

    def prepare(self, request: Request) -> Any:
        """A request that will be run again and again, on memory of the same shapes."""
        ...

    def run_again(self, prepared: Any, input_at: int, output_at: int, spans: Spans, *owners: Any) -> Outcome | None:
        """Runs what `prepare` gave, on the memory there; by one caller at a time. None: the result lies in the output.

        `spans(*owners)` gives input and output where more of them is needed than their places.
        """
        ...

    def poll(self, handle: int, seconds: float = 0.0) -> bool:
        """Whether the operation is done (or has failed) within `seconds`; ValueError for an unknown handle."""
        ...

    def wait(self, handle: int, timeout: float | None = None, aside: bool = False) -> Outcome:
        """Waits and releases the handle. FarandoleTimeout after `timeout` seconds leaves the handle as it was.

        `aside`: other threads compute meanwhile; this one leaves the work to the engine's own.
        """
        ...

    def settle(self, memory: Span) -> None:
        """Says that a tensor's memory is used again and again: it is brought into huge pages where that can be done."""
        ...

    def share(self, fd: int, address: int, size: int) -> int:
        """Lets the ranks of this host reach memory, a mapping of the whole file, where it lies; gives its number.

        An allreduce in place on such memory of all members takes one pass. `unshare` comes before the memory goes.
        """
        ...

    def unshare(self, region: int) -> None:
        """The memory is nobody else's any more."""
        ...

    def add_link(self, peer: int, fd: int, kind: int) -> None:
        """Takes over a connected, authenticated stream to `peer`; kind 0: unix socket on one host, 1: TCP."""
        ...

    def watch_links(self, wanted: Callable[[int], None]) -> None:
        """From now on `wanted(peer)` is called, on a Python thread, when a link to `peer` is needed."""
        ...

    def start(self, timeout: float) -> None:
        """Begins to work once the first links are there; raises after `timeout` seconds."""
        ...

    def leave(self, linger: float = 2.0) -> None:
        """Leaves in good order: pending operations end with ShutDown, peers are told."""
        ...

    def close(self) -> None:
        """Leaves if need be and frees everything. Calling it again does nothing."""
        ...

    def revoke(self, code: int, rank: int, message: str) -> None:
        """Ends every operation now, for good, here and on the peers; `rank` is blamed (or -1)."""
        ...

    def counter(self, name: str) -> int:
        """One of COUNTERS."""
        ...

    def tuning(self) -> list[int]:
        """What can be tuned, as it is now (tuning/search.py, Values); empty where nothing can."""
        ...

    def trace(self, on: bool, mark_plans: bool = False) -> None:
        """Switches the recording of trace events."""
        ...

    def trace_drain(self) -> bytes:
        """Recorded events so far, one JSON object per line; empty when there are none."""
        ...
