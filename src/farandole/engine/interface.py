# The engine interface: it takes requests and returns outcomes. native.py and reference.py implement it.
# Touches only NumPy.
"""The types between the operations that users call and the engine that runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Kind(IntEnum):
    """The operations that a rank can request; the numbers are those of the core."""

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
    TUNE = 11  # only from rank 0


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


NAMES = tuple(dtype.name.lower() for dtype in DType)

# NumPy has no bfloat16: such elements are in uint16 arrays, and only the dtype of the request tells.
STORAGE: dict[DType, np.dtype[Any]] = {
    dtype: np.dtype(np.uint16 if dtype == DType.BFLOAT16 else name) for dtype, name in zip(DType, NAMES, strict=True)
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
    raise unsupported("arrays", array.dtype)


def unsupported(what: str, dtype: Any) -> ValueError:
    """The error for elements that cannot be sent, as for `"arrays"`."""
    return ValueError(f"{what} of dtype {dtype} are not supported; supported are {', '.join(NAMES)}")


def _dtype_of_memory(memory: Any) -> DType:
    """The element type of memory that is not an array. Raises ValueError if it names none, as tensors of DLPack do."""
    try:
        seen = memory if hasattr(memory, "__array_interface__") else memoryview(memory)
    except TypeError:
        raise ValueError(f"{type(memory).__name__} does not name its element type; give dtype=DType....") from None
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
    "on_device_bytes",
    "nccl_bytes",
)


class Span:
    """Contiguous memory of a framework's tensor, which it keeps alive. It avoids the cost of a NumPy view."""

    __slots__ = ("address", "memory", "owner", "shape")

    def __init__(self, address: int, shape: tuple[int, ...], owner: Any, memory: Any) -> None:
        self.address = address
        self.shape = shape
        self.owner = owner  # the tensor
        self.memory = memory  # keeps the bytes alive even if the tensor gets other memory

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
Spans: TypeAlias = Callable[..., tuple[Memory, Memory]]


@dataclass(slots=True)
class Request:
    """One operation. Arrays are C-contiguous; the caller must not change them until the handle is done.

    `output` may be `input` itself (in place). For allgather and alltoall it may be None. The engine then allocates the
    output, and also when the result has another size than `output`.
    """

    kind: Kind
    name: str | None = None  # None: paired across ranks by the order of calls per (group, kind)
    input: Memory = None
    output: Memory = None
    dtype: DType | None = None  # None: that of the array; BFLOAT16 must be given, because it is stored in uint16
    op: ReduceOp = ReduceOp.SUM
    group: int = 0
    peer: int = -1  # broadcast: the root; send, receive: the other rank. A rank of the job; receive: -1 for any
    # alltoall: rows per member; add_group: count, ranks..., again; remove_group: the id; tune: the core's six values
    splits: Sequence[int] | None = None
    prescale: float = 1.0
    postscale: float = 1.0
    # add_group: 0, or a number from 1 << 20 on which the members agree; then only they request the group.
    # remove_group: 0; for a group with such a number 1 (this rank leaves it) or 2 (it ends on all members, with an
    # error).
    tag: int = 0
    # allreduce in place on memory in several places: rows of address and bytes. `input` keeps all of it alive and has
    # the shape of the whole. Only for engines with `supports_pieces`.
    pieces: NDArray[np.int64] | None = None
    device: int = -1  # the device of the user's tensor, -1: CPU; ranks must agree whether it is a GPU
    # The CUDA device on which the memory lies, and the stream in which it is used. None: memory of the CPU. For engines
    # that `cuda.enable` has prepared.
    gpu: tuple[int, int] | None = None

    def elements(self) -> DType:
        """The element type, given or found; uint8 without memory (barrier, join)."""
        if self.dtype is not None:
            return self.dtype
        memory = self.input if self.input is not None else self.output
        if isinstance(memory, np.ndarray):
            return dtype_of(memory)
        return DType.UINT8 if memory is None else _dtype_of_memory(memory)

    def with_arrays(self) -> Request:
        """The same request with arrays instead of spans."""
        first, output = self.input, self.output
        seen = first.array(self.elements()) if isinstance(first, Span) else first
        if isinstance(output, Span):
            output = seen if output is first else output.array(self.elements())
        return replace(self, input=seen, output=output)


def with_memory(request: Request, first: Memory, output: Memory) -> Request:
    """The same request on other memory."""
    return replace(request, input=first, output=output)


def array_over(memory: Any, shape: tuple[int, ...], dtype: DType) -> Array:
    """An array over the bytes of `memory`, which it keeps alive."""
    return np.ndarray(shape, STORAGE[dtype], memory)


def new_array(shape: tuple[int, ...], dtype: DType) -> Array:
    """An array in new memory."""
    return np.empty(shape, STORAGE[dtype])


@dataclass(slots=True)
class Outcome:
    """The result of a request. bfloat16 results are uint16 arrays."""

    output: Memory = None
    splits: list[int] | None = None  # alltoall: rows received from each member
    value: int = 0  # join: the last rank; receive from any: the sender; add_group: the first new id (the others follow)


class Prepared(Protocol):
    """A request that can run many times, by one caller at a time."""

    def run(self, tensor: Any, result: Any, /) -> Outcome | None:
        """None: the result is in `result`. NotImplemented: nothing was done, because the tensor has another type or
        another thread is in this call.
        """
        ...


class Engine(Protocol):
    """One rank's engine. Calls are safe from any thread; errors are those of errors.py, or ValueError."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def supports_pieces(self) -> bool:
        """Whether requests may have pieces."""
        ...

    def submit(self, requests: Sequence[Request], bundle: bool = False, prompt: bool = False) -> list[int]:
        """Accepts all requests or none and returns their handles.

        With `bundle` they become ready together. `prompt`: the caller waits for them at once.
        """
        ...

    def run(self, request: Request) -> Outcome:
        """Submits one request and waits for it."""
        ...

    def prepare(self, request: Request, tensor_type: type, spans: Spans) -> Prepared | None:
        """An object that runs the request many times, on tensors of exactly that type, its shape and its element type.

        `spans(tensor, result)` returns input and output when more than their addresses is needed. None: this engine
        cannot read such tensors from C, and the caller makes a new request each time.
        """
        ...

    def poll(self, handle: int, seconds: float = 0.0) -> bool:
        """Whether the operation is done (or has failed) within `seconds`; ValueError for an unknown handle."""
        ...

    def wait(self, handle: int, timeout: float | None = None, passive: bool = False) -> Outcome:
        """Waits and releases the handle. After `timeout` seconds it raises FarandoleTimeout and keeps the handle.

        `passive`: other threads compute meanwhile, so this thread leaves the work to the engine's own thread.
        """
        ...

    def use_huge_pages(self, memory: Span) -> None:
        """Tells the engine that a tensor's memory is used often, so it is moved into huge pages where possible."""
        ...

    def share(self, fd: int, address: int, size: int) -> int:
        """Lets the ranks of this host access memory in place (a mapping of the whole file); returns its number.

        An allreduce in place on such memory of all members takes one pass. Call `unshare` before the memory is freed.
        """
        ...

    def unshare(self, region: int) -> None:
        """Other ranks can no longer access the memory."""
        ...

    def add_link(self, peer: int, fd: int, kind: int) -> None:
        """Takes over a connected, authenticated stream to `peer`; kind 0: unix socket on one host, 1: TCP."""
        ...

    def watch_links(self, wanted: Callable[[int], None]) -> None:
        """From now on `wanted(peer)` is called, on a Python thread, when a link to `peer` is needed."""
        ...

    def start(self, timeout: float) -> None:
        """Starts to work when the first links are there; raises after `timeout` seconds."""
        ...

    def leave(self, linger: float = 2.0) -> None:
        """Leaves the job without a failure: pending operations end with ShutDown, here and on the peers."""
        ...

    def close(self) -> None:
        """Leaves if necessary and frees everything. A second call does nothing."""
        ...

    def revoke(self, code: int, rank: int, message: str) -> None:
        """Ends every operation now, here and on the peers; `rank` is the cause (or -1)."""
        ...

    def counter(self, name: str) -> int:
        """One of COUNTERS."""
        ...

    def tuning(self) -> list[int]:
        """The current tuned values (tuning/search.py, Values); empty if nothing can be tuned."""
        ...

    def trace(self, on: bool, mark_plans: bool = False) -> None:
        """Switches the recording of trace events on or off."""
        ...

    def trace_drain(self) -> bytes:
        """Recorded events so far, one JSON object per line; empty when there are none."""
        ...
