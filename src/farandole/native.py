# The native engine: the core's C interface (core/api/farandole.h) behind the Engine protocol.
# The only file that sees the C interface. Touches config, engine, errors, version.
"""Loads the native library, hands it requests and turns its outcomes into NumPy arrays."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import errors
from .config import ALGORITHMS, Config
from .engine import COUNTERS, STORAGE, Array, DType, Kind, Outcome, Request
from .version import package_version

ABI = 1
LIBRARY = Path(__file__).with_name("_native") / "libfarandole.so"
# Results up to this size are copied out at once: cheaper than keeping the core's memory on loan.
COPIED_BYTES = 64 << 10
SLICE_MS = 100  # so that Python's signal handlers run while a thread waits
_ERROR_BYTES = 1024
_TRACE_BYTES = 1 << 20
_LISTENER_SECONDS = 10.0  # for the answer to a link wish that is under way

_log = logging.getLogger("farandole")


def _fields(*runs: tuple[Any, str]) -> list[tuple[str, Any]]:
    """Fields of a C struct, in order: runs of names that share a type."""
    return [(name, kind) for kind, names in runs for name in names.split()]


_INT, _LONG, _TEXT, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_char_p, ctypes.c_void_p


class _Options(ctypes.Structure):
    _fields_ = _fields(
        (ctypes.c_uint32, "abi"),
        (_INT, "rank size"),
        (ctypes.POINTER(_INT), "hosts"),
        (ctypes.c_uint32, "generation"),
        (_INT, "allreduce_algorithm"),
        (_LONG, "fusion_threshold plan_capacity flush_us spin_us"),
        (_LONG, "stall_note_ms stall_warning_ms stall_shutdown_ms slot_bytes"),
        (_INT, "slots fuse_bundles"),
        (_LONG, "chunk_bytes"),
    )


class _Outcome(ctypes.Structure):
    _fields_ = _fields(
        (_INT, "code rank"),
        (_LONG, "value"),
        (_TEXT, "message phase"),
        (_POINTER, "output"),
        (_LONG, "output_bytes"),
        (_INT, "dimensions splits_count"),
        (ctypes.POINTER(_LONG), "shape splits"),
    )


class _Event(ctypes.Structure):
    _fields_ = _fields((_INT, "kind peer level reserved"), (ctypes.c_char * 4096, "text"))


# struct farandole_request, packed by one call instead of seventeen assignments: this is every gradient's way.
_REQUEST = struct.Struct("@6i4P2iP2dqP")

_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "farandole_version": (_TEXT, ()),
    "farandole_kernels": (_TEXT, ()),
    "farandole_create": (_INT, (_POINTER, _POINTER, _POINTER, ctypes.c_size_t)),
    "farandole_add_link": (_INT, (_POINTER, _INT, _INT, _INT)),
    "farandole_start": (_INT, (_POINTER, _LONG, _POINTER, ctypes.c_size_t)),
    "farandole_leave": (_INT, (_POINTER, _LONG)),
    "farandole_revoke": (_INT, (_POINTER, _INT, _INT, _TEXT)),
    "farandole_destroy": (None, (_POINTER,)),
    "farandole_submit": (_INT, (_POINTER, _POINTER, _INT, _INT, _POINTER, _POINTER, ctypes.c_size_t)),
    "farandole_poll": (_INT, (_POINTER, _LONG)),
    "farandole_wait": (_INT, (_POINTER, _LONG, _LONG)),
    "farandole_outcome_of": (_INT, (_POINTER, _LONG, _POINTER)),
    "farandole_release": (None, (_POINTER, _LONG)),
    "farandole_next_event": (_INT, (_POINTER, _POINTER, _LONG)),
    "farandole_counter": (_LONG, (_POINTER, _INT)),
    "farandole_trace": (_INT, (_POINTER, _INT, _INT)),
    "farandole_trace_drain": (_LONG, (_POINTER, _POINTER, _LONG)),
    # In the test library alone:
    "farandole_chaos_set": (_INT, (_POINTER, _TEXT, _TEXT, _INT)),
    "farandole_chaos_fired": (_LONG, (_POINTER, _TEXT)),
}


@functools.cache
def load(path: str | None = None) -> ctypes.CDLL:
    """The native library, checked against this package; LibraryMissing says how to get it."""
    place = Path(path) if path else LIBRARY
    fallback = "FARANDOLE_ENGINE=python selects the slow engine that needs no library."
    if not place.exists():
        raise errors.LibraryMissing(
            f"the native library {place} does not exist. In a checkout, build it with "
            f"`cmake -B build -S . && cmake --build build -j`. {fallback}"
        )
    try:
        library = ctypes.CDLL(str(place))
        for name, (result, arguments) in _SIGNATURES.items():
            if "_chaos_" not in name or hasattr(library, name):
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise errors.LibraryMissing(f"the native library {place} cannot be used: {error}. {fallback}") from None
    found, expected = library.farandole_version().decode(), package_version()
    if found != expected:
        raise errors.LibraryMissing(
            f"the native library {place} is version {found}, the package is {expected}: rebuild it. {fallback}"
        )
    return library


class _Loan:
    """Memory of the core under a NumPy array; goes back when the array and its views are gone."""

    __slots__ = ("__array_interface__", "engine", "handle")

    def __init__(self, engine: NativeEngine, handle: int, address: int, shape: tuple[int, ...], dtype: DType) -> None:
        self.engine = engine
        self.handle = handle
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": shape,
            "typestr": STORAGE[dtype].str,
        }

    def __del__(self) -> None:
        self.engine._give_back(self.handle)


class _Arena(threading.local):
    """A thread's memory for request structs, their shapes, splits and names."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(16 << 10)
        self.error = ctypes.create_string_buffer(_ERROR_BYTES)

    def sized(self, size: int) -> ctypes.Array[ctypes.c_char]:
        if size > len(self.buffer):
            self.buffer = ctypes.create_string_buffer(2 * size)
        return self.buffer


_arena = _Arena()


def _address(array: Array | None) -> int:
    if array is None:
        return 0
    if not array.flags.c_contiguous:
        raise ValueError("the array is not contiguous; pass numpy.ascontiguousarray(array)")
    address: int = array.__array_interface__["data"][0]
    return address


def _pack(requests: Sequence[Request]) -> int:
    """Writes the structs and what they point to into this thread's arena; gives the address of the first."""
    words: list[int] = []
    names = bytearray()
    places: list[tuple[int, int, int, int, int]] = []
    for request in requests:
        array = request.input if request.input is not None else request.output
        shape: tuple[int, ...] = () if array is None else array.shape
        splits = () if request.splits is None else request.splits
        name = -1
        if request.name is not None:
            name = len(names)
            names += request.name.encode()
            names.append(0)
        places.append((len(words), len(shape), len(words) + len(shape), len(splits), name))
        words += shape
        words += splits
    words_at = _REQUEST.size * len(requests)
    names_at = words_at + 8 * len(words)
    buffer = _arena.sized(names_at + len(names))
    base = ctypes.addressof(buffer)
    for index, (request, place) in enumerate(zip(requests, places, strict=True)):
        shape_at, dimensions, splits_at, splits_count, name = place
        _REQUEST.pack_into(
            buffer,
            index * _REQUEST.size,
            request.kind,
            request.elements(),
            request.op,
            request.group,
            request.peer,
            -1,
            base + names_at + name if name >= 0 else 0,
            _address(request.input),
            _address(request.output),
            base + words_at + 8 * shape_at,
            dimensions,
            splits_count,
            base + words_at + 8 * splits_at if request.splits is not None else 0,
            request.prescale,
            request.postscale,
            request.tag,
            0,
        )
    struct.pack_into(f"@{len(words)}q", buffer, words_at, *words)
    ctypes.memmove(base + names_at, bytes(names), len(names))
    return base


def _milliseconds(seconds: float) -> int:
    return max(0, round(seconds * 1000))


class NativeEngine:
    """The Engine protocol over the core. One object is one rank; a process may hold several."""

    def __init__(self, config: Config, rank: int, hosts: Sequence[int], generation: int = 0) -> None:
        """`hosts` has a host number for each rank of the job: ranks with one number share memory."""
        self.rank = rank
        self.size = len(hosts)
        self.generation = generation
        self._library = load(config.library)
        self._lock = threading.RLock()  # re-entrant: a garbage collection inside it may give back a loan
        self._idle = threading.Condition(self._lock)
        self._calls = 0
        self._closed = False
        self._forked = False
        self._pending: dict[int, Request] = {}  # keeps the arrays alive until the core is done with them
        self._loans: set[int] = set()
        self._wanted: Callable[[int], None] | None = None
        self._unanswered: list[int] = []
        self._listener: threading.Thread | None = None
        self._pointer = self._create(config, hosts)
        self._undestroyed = [self._pointer]  # popped by whoever destroys the core's object
        _engines.add(self)

    def _create(self, config: Config, hosts: Sequence[int]) -> int:
        checked = not config.stall_check_disable
        shutdown = config.stall_shutdown_time_seconds
        if shutdown < config.stall_check_time_seconds:
            shutdown = 0.0  # the contract's rule
        options = _Options(
            abi=ABI,
            rank=self.rank,
            size=self.size,
            hosts=(ctypes.c_int32 * self.size)(*hosts),
            generation=self.generation,
            allreduce_algorithm=ALGORITHMS.index(config.allreduce_algorithm),
            fusion_threshold=config.fusion_threshold,
            plan_capacity=config.cache_capacity,
            flush_us=config.flush_us,
            spin_us=config.spin_us,
            stall_note_ms=_milliseconds(config.stall_note_seconds) if checked else 0,
            stall_warning_ms=_milliseconds(config.stall_check_time_seconds) if checked else 0,
            stall_shutdown_ms=_milliseconds(shutdown) if checked else 0,
            slot_bytes=config.slot_bytes,
            slots=config.slots,
            fuse_bundles=0 if config.disable_group_fusion else 1,
            chunk_bytes=config.chunk_bytes,
        )
        pointer = ctypes.c_void_p()
        error = _arena.error
        code = self._library.farandole_create(ctypes.byref(options), ctypes.byref(pointer), error, _ERROR_BYTES)
        if code != errors.OK or not pointer.value:
            raise errors.translate(code or errors.INTERNAL, error.value.decode(errors="replace"))
        return pointer.value

    def _enter(self) -> None:
        if self._forked:
            raise errors.HorovodInternalError(
                f"this process was forked from rank {self.rank}; the engine belongs to the parent process"
            )
        with self._lock:
            if self._closed:
                raise errors.ShutDown("Farandole has been shut down", rank=self.rank)
            self._calls += 1

    def _exit(self) -> None:
        with self._lock:
            self._calls -= 1
            if self._calls == 0 and self._closed:
                self._idle.notify_all()

    def _call(self, function: Any, *arguments: Any) -> Any:
        """Calls the core; close() waits for such calls and never pulls the object from under one."""
        self._enter()
        try:
            return function(self._pointer, *arguments)
        finally:
            self._exit()

    def _checked(self, doing: str, function: Any, *arguments: Any) -> None:
        code = self._call(function, *arguments)
        if code != errors.OK:
            raise errors.translate(code, f"{doing} failed with code {code}", generation=self.generation)

    def _failure(self, code: int) -> Exception:
        return errors.translate(code, _arena.error.value.decode(errors="replace"), generation=self.generation)

    def submit(self, requests: Sequence[Request], bundle: bool = False) -> list[int]:
        if not requests:
            return []
        count = len(requests)
        handles = (ctypes.c_int64 * count)()
        self._enter()
        try:
            try:
                base = _pack(requests)
            except struct.error as error:
                raise ValueError(f"a number in the request is out of range: {error}") from None
            submit = self._library.farandole_submit
            code = submit(self._pointer, base, count, int(bundle), handles, _arena.error, _ERROR_BYTES)
            if code != errors.OK:
                raise self._failure(code)
            result = list(handles)
            self._pending.update(zip(result, requests, strict=True))
            return result
        finally:
            self._exit()

    def poll(self, handle: int) -> bool:
        state: int = self._call(self._library.farandole_poll, handle)
        if state < 0:
            raise ValueError(f"there is no handle {handle}")
        return bool(state)

    def wait(self, handle: int, timeout: float | None = None) -> Outcome:
        deadline = None if timeout is None else time.monotonic() + timeout
        self._enter()
        try:
            slice_ms = SLICE_MS
            while True:
                if deadline is not None:
                    slice_ms = min(SLICE_MS, _milliseconds(deadline - time.monotonic()))
                code = self._library.farandole_wait(self._pointer, handle, slice_ms)
                if code == errors.OK:
                    return self._take(handle)
                if code == errors.INVALID_ARGUMENT:
                    raise ValueError(f"there is no handle {handle}")
                if self._closed:
                    raise errors.ShutDown("Farandole has been shut down", rank=self.rank)
                if deadline is not None and time.monotonic() >= deadline:
                    request = self._pending.get(handle)
                    what = "the operation" if request is None else f"{request.kind.name} {request.name or '(unnamed)'}"
                    raise errors.FarandoleTimeout(f"{what} was not done after {timeout:g} s", seconds=timeout)
        finally:
            self._exit()

    def _take(self, handle: int) -> Outcome:
        """Turns a finished operation into its outcome and frees the handle, unless its memory goes on loan."""
        found = _Outcome()
        if self._library.farandole_outcome_of(self._pointer, handle, ctypes.byref(found)) != errors.OK:
            raise ValueError(f"there is no handle {handle}")
        request = self._pending.pop(handle, None)
        on_loan = False
        try:
            if found.code != errors.OK:
                raise errors.translate(
                    found.code,
                    (found.message or b"").decode(errors="replace"),
                    rank=found.rank,
                    phase=(found.phase or b"").decode(errors="replace"),
                    generation=self.generation,
                    name="" if request is None else request.name or "",
                )
            outcome = Outcome(value=found.value)
            if found.splits_count:
                outcome.splits = np.array(found.splits[: found.splits_count], dtype=np.int64)
            if request is not None and request.output is not None:
                outcome.output = request.output
            elif request is not None and request.kind in (Kind.ALLGATHER, Kind.ALLTOALL):
                shape = tuple(found.shape[: found.dimensions])
                on_loan = found.output_bytes > COPIED_BYTES
                outcome.output = self._received(handle, found, shape, request.elements(), on_loan)
            return outcome
        finally:
            if not on_loan:
                self._library.farandole_release(self._pointer, handle)

    def _received(self, handle: int, found: _Outcome, shape: tuple[int, ...], dtype: DType, on_loan: bool) -> Array:
        if on_loan:
            self._loans.add(handle)
            return np.asarray(_Loan(self, handle, found.output, shape, dtype))
        array = np.empty(shape, dtype=STORAGE[dtype])
        if array.nbytes:
            ctypes.memmove(_address(array), found.output, array.nbytes)
        return array

    def _give_back(self, handle: int) -> None:
        if self._forked:
            return  # the memory belongs to the parent's engine
        # The loan itself keeps the core's object alive, also after close().
        self._library.farandole_release(self._pointer, handle)
        with self._lock:
            self._loans.discard(handle)
            self._destroy_if_unused()

    def _destroy_if_unused(self) -> None:
        if self._closed and self._calls == 0 and not self._loans and self._listener is None and self._undestroyed:
            self._library.farandole_destroy(self._undestroyed.pop())

    def add_link(self, peer: int, fd: int, kind: int) -> None:
        self._checked(f"the link to rank {peer}", self._library.farandole_add_link, peer, fd, kind)

    def watch_links(self, wanted: Callable[[int], None]) -> None:
        with self._lock:
            self._wanted = wanted
            unanswered, self._unanswered = self._unanswered, []
        for peer in unanswered:
            wanted(peer)

    def start(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        # Listening begins first: the exchange itself may log, and may want links.
        self._listener = threading.Thread(target=self._listen, name=f"farandole-events-{self.rank}", daemon=True)
        self._listener.start()
        while True:
            left = _milliseconds(deadline - time.monotonic())
            code = self._call(self._library.farandole_start, left, _arena.error, _ERROR_BYTES)
            if code == errors.OK:
                return
            if code != errors.IN_PROGRESS or left == 0:
                raise self._failure(code if code != errors.IN_PROGRESS else errors.TIMED_OUT)

    def _listen(self) -> None:
        event = _Event()
        while True:
            code = self._library.farandole_next_event(self._pointer, ctypes.byref(event), -1)
            if code not in (errors.OK, errors.IN_PROGRESS):
                return
            if code == errors.OK:
                self._hear(event)

    def _hear(self, event: _Event) -> None:
        try:
            if event.kind == 2:
                _log.log(event.level, "%s", event.text.decode(errors="replace"))
            elif event.kind == 1:
                with self._lock:
                    wanted = self._wanted
                    if wanted is None:
                        self._unanswered.append(event.peer)
                if wanted is not None:
                    wanted(event.peer)
        except Exception:  # one bad event must not silence the ones after it
            _log.exception("an event of the engine could not be handled")

    def leave(self, linger: float = 2.0) -> None:
        self._checked("leaving", self._library.farandole_leave, _milliseconds(linger))

    def close(self) -> None:
        if self._forked:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._library.farandole_leave(self._pointer, 0)
        listener = self._listener
        if listener is not None:
            listener.join(_LISTENER_SECONDS)
            if listener.is_alive():
                # A leak is better than memory pulled from under the thread.
                _log.warning("the thread %s does not end; its engine is not freed", listener.name)
                return
        with self._lock:
            while self._calls:
                self._idle.wait()
            self._listener = None
            self._pending.clear()
            self._destroy_if_unused()

    def revoke(self, code: int, rank: int, message: str) -> None:
        self._checked("revoking", self._library.farandole_revoke, code, rank, message.encode())

    def counter(self, name: str) -> int:
        return int(self._call(self._library.farandole_counter, COUNTERS.index(name)))

    def trace(self, on: bool, mark_plans: bool = False) -> None:
        self._checked("switching the trace", self._library.farandole_trace, int(on), int(mark_plans))

    def trace_drain(self) -> bytes:
        buffer = ctypes.create_string_buffer(_TRACE_BYTES)
        parts: list[bytes] = []
        while (count := self._call(self._library.farandole_trace_drain, buffer, _TRACE_BYTES)) > 0:
            parts.append(ctypes.string_at(buffer, count))
        return b"".join(parts)

    def chaos_set(self, point: str, action: str, skip: int = 0) -> None:
        """Makes something go wrong at a named point; only the test library can."""
        set_point = self._library.farandole_chaos_set
        self._checked(f"setting the failpoint {point}", set_point, point.encode(), action.encode(), skip)

    def chaos_fired(self, point: str) -> int:
        """How often the failpoint has fired."""
        return int(self._call(self._library.farandole_chaos_fired, point.encode()))

    def _after_fork(self) -> None:
        # Another thread may have held the lock when this child was made.
        self._forked = True
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)


_engines: weakref.WeakSet[NativeEngine] = weakref.WeakSet()


def _mark_forked() -> None:
    for engine in list(_engines):
        engine._after_fork()


os.register_at_fork(after_in_child=_mark_forked)
