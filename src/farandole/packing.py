# Requests as the structs of the C interface: memory that is made once, because this is every gradient's way.
# Touches engine. Knows how the structs of core/api/farandole.h lie in memory; calls nothing of it.
"""`arenas.borrow()` gives a thread memory to pack requests into; `Packed` is a request that is run again and again."""

from __future__ import annotations

import ctypes
import functools
import math
import struct
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from .engine import ROWS_VARY, STORAGE, Array, Memory, Request, Span

ERROR_BYTES = 1024
INT, LONG, TEXT, POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_char_p, ctypes.c_void_p


def fields(*runs: tuple[Any, str]) -> list[tuple[str, Any]]:
    """Fields of a C struct, in order: runs of names that share a type."""
    return [(name, kind) for kind, names in runs for name in names.split()]


class OutcomeStruct(ctypes.Structure):
    """struct farandole_outcome"""

    _fields_ = fields(
        (INT, "code rank"),
        (LONG, "value"),
        (TEXT, "message phase"),
        (POINTER, "output"),
        (LONG, "output_bytes"),
        (INT, "dimensions splits_count"),
        (ctypes.POINTER(LONG), "shape splits"),
    )


# struct farandole_request, packed by one call instead of twenty assignments.
_REQUEST = struct.Struct("@6i4P2iP2dq2P2q")
_INPUT_AT = struct.calcsize("@6iP")  # of `input`; `output` follows
_PLACES = struct.Struct("@2P")
# struct farandole_call: engine, request, error, its capacity, timeout_ms, outcome, handle.
_CALL = struct.Struct("@3PNqPq")
_HANDLE = struct.Struct("@q")
_HANDLE_AT = _CALL.size - _HANDLE.size
_words = functools.cache(lambda count: struct.Struct(f"@{count}q"))


class Arena:
    """Memory for what goes to the core and comes back."""

    def __init__(self, size: int = 16 << 10) -> None:
        self.error = ctypes.create_string_buffer(ERROR_BYTES)
        self._error_at = ctypes.addressof(self.error)
        self.outcome = OutcomeStruct()
        self._outcome_at = ctypes.addressof(self.outcome)
        self.outcome_at = ctypes.c_void_p(self._outcome_at)
        self._call = bytearray(_CALL.size)
        self.call_at = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(self._call)))
        self.resize(size)

    def resize(self, size: int) -> None:
        self.size = size
        self.memory = bytearray(size)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def call(self, engine: int, request_at: int, timeout_ms: int) -> None:
        """Writes the call that runs a packed request."""
        parts = (engine, request_at, self._error_at, ERROR_BYTES, timeout_ms, self._outcome_at, 0)
        _CALL.pack_into(self._call, 0, *parts)

    @property
    def handle(self) -> int:
        """After a call that left something to wait for, or to look at."""
        number: int = _HANDLE.unpack_from(self._call, _HANDLE_AT)[0]
        return number


class _Arenas(threading.local):
    """A thread's arenas that are not in use. A signal handler may come in between and then needs one of its own."""

    def __init__(self) -> None:
        self.spare = [Arena()]

    def borrow(self) -> Arena:
        return self.spare.pop() if self.spare else Arena()


arenas = _Arenas()


def _slow_address(array: Array) -> int:
    place: int = array.__array_interface__["data"][0]
    return place


def _quick_address(array: Array) -> int:
    """The pointer after the object's header: NumPy's binary interface has it there, and asking costs ten times more."""
    return ctypes.c_void_p.from_address(id(array) + object.__basicsize__).value or 0


_PROBE = np.zeros(1)
_address_of = _quick_address if _quick_address(_PROBE) == _slow_address(_PROBE) else _slow_address


def address(memory: Memory) -> int:
    """Where it begins; 0 for none."""
    if memory is None:
        return 0
    if type(memory) is Span:
        return memory.address
    if not memory.flags.c_contiguous:
        raise ValueError("the array is not contiguous; pass numpy.ascontiguousarray(array)")
    return _address_of(memory)


def pack(requests: Sequence[Request], arena: Arena) -> int:
    """Writes the structs, then what they point to, into the arena; gives the address of the first."""
    try:
        while not (base := _try_pack(requests, arena)):
            arena.resize(2 * arena.size)
    except struct.error as error:
        raise ValueError(f"a number in the request is out of range: {error}") from None
    return base


def _try_pack(requests: Sequence[Request], arena: Arena) -> int:
    memory, base, size = arena.memory, arena.base, arena.size
    place = _REQUEST.size * len(requests)
    if place > size:
        return 0
    at = 0
    for request in requests:
        first, output = request.input, request.output
        shaped = output if first is None else first
        shape: tuple[int, ...] = () if shaped is None else shaped.shape
        splits = request.splits
        pieces = request.pieces
        words = shape if splits is None else (*shape, *splits)
        name = b"" if request.name is None else request.name.encode() + b"\0"
        names_at = place + 8 * len(words)
        end = names_at + len(name)
        if end > size:
            return 0
        if words:
            _words(len(words)).pack_into(memory, place, *words)
        memory[names_at:end] = name
        input_at = address(first)
        _REQUEST.pack_into(
            memory,
            at,
            request.kind,
            request.elements() if request.dtype is None else request.dtype,
            request.op,
            request.group,
            request.peer,
            request.device,
            base + names_at if name else 0,
            input_at,
            input_at if output is first else address(output),
            base + place,
            len(shape),
            0 if splits is None else len(splits),
            0 if splits is None else base + place + 8 * len(shape),
            request.prescale,
            request.postscale,
            request.tag,
            0,
            address(pieces),
            0 if pieces is None else len(pieces),
            _room(request) if output is not None and request.kind in ROWS_VARY else 0,
        )
        at += _REQUEST.size
        place = end + -end % 8
    return base


def _room(request: Request) -> int:
    """Bytes of the memory that is offered for a result."""
    elements: int = math.prod(request.output.shape)
    return elements * STORAGE[request.elements()].itemsize


class Packed:
    """A request in memory of its own, to be run any number of times, by one caller at a time."""

    __slots__ = ("arena", "request")

    def __init__(self, engine: int, request: Request, timeout_ms: int) -> None:
        self.request = request
        self.arena = Arena(256)
        self.arena.call(engine, pack((request,), self.arena), timeout_ms)

    def move(self, input_at: int, output_at: int) -> None:
        """Works on other memory, of the same sizes."""
        _PLACES.pack_into(self.arena.memory, _INPUT_AT, input_at, output_at)
