# The native engine: the core's C interface (core/api/farandole.h) behind the Engine protocol.
# Touches config, engine, errors, library and packing.
"""Hands the native library requests and turns its outcomes into NumPy arrays."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from . import errors
from .config import ALGORITHMS, Config
from .engine import COUNTERS, ROWS_VARY, STORAGE, Array, DType, Outcome, Request, Span, Spans
from .library import ABI, calls, load
from .packing import ERROR_BYTES, INT, LONG, POINTER, TEXT, Arena, OutcomeStruct, Packed, address, arenas, fields, pack

# Results up to this size are copied out at once: cheaper than keeping the core's memory on loan.
COPIED_BYTES = 64 << 10
_TOLD = -1  # farandole_run's word that the outcome is there
SLICE_MS = 100  # so that Python's signal handlers run while a thread waits
_TRACE_BYTES = 1 << 20
_LISTENER_SECONDS = 10.0  # for the answer to a link wish that is under way

_log = logging.getLogger("farandole")


@functools.lru_cache(64)
def _handles(count: int) -> type[ctypes.Array[ctypes.c_int64]]:
    """ctypes makes such a type anew each time, which takes longer than a submission."""
    return ctypes.c_int64 * count


class _Options(ctypes.Structure):
    _fields_ = fields(
        (ctypes.c_uint32, "abi"),
        (INT, "rank size"),
        (ctypes.POINTER(INT), "hosts"),
        (ctypes.c_uint32, "generation"),
        (INT, "allreduce_algorithm"),
        (LONG, "fusion_threshold plan_capacity flush_us spin_us"),
        (LONG, "stall_note_ms stall_warning_ms stall_shutdown_ms slot_bytes"),
        (INT, "slots fuse_bundles"),
        (LONG, "chunk_bytes"),
        (INT, "tcp_streams"),
    )


class _Event(ctypes.Structure):
    _fields_ = fields((INT, "kind peer level reserved"), (ctypes.c_char * 4096, "text"))


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


def _milliseconds(seconds: float) -> int:
    return max(0, round(seconds * 1000))


class NativeEngine:
    """The Engine protocol over the core. One object is one rank; a process may hold several."""

    scatters = True

    def __init__(self, config: Config, rank: int, hosts: Sequence[int], generation: int = 0) -> None:
        """`hosts` has a host number for each rank of the job: ranks with one number share memory."""
        self.rank = rank
        self.size = len(hosts)
        self.generation = generation
        self._library = load(config.library)
        self._submit = self._library.farandole_submit
        self._run = self._library.farandole_run
        self._wait = self._library.farandole_wait
        self._wait_aside = self._library.farandole_wait_aside
        self._outcome_of = self._library.farandole_outcome_of
        self._release = self._library.farandole_release
        # One entry per call of the core under way. Lists and sets change atomically: no lock on the way of a gradient,
        # none that a fork could leave locked, none that a garbage collection could meet.
        self._calls: list[None] = []
        self._pending: dict[int, Request] = {}  # keeps the arrays alive until the core is done with them
        self._lent: list[Any] = []  # what ends the use of this engine by a framework's calls
        self._abandoned: list[Any] = []  # of calls that an interrupt ended: the core may still use the arrays
        self._loans: set[int] = set()
        self._closed = False  # no call begins any more
        self._closing = threading.Lock()
        self._left = False  # nothing of the core runs any more
        self._forked = False
        self._wanted: Callable[[int], None] | None = None
        self._unanswered: list[int] = []
        self._listener: threading.Thread | None = None
        self._pointer = ctypes.c_void_p(self._create(config, hosts))
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
            tcp_streams=config.tcp_streams,
        )
        pointer = ctypes.c_void_p()
        error = ctypes.create_string_buffer(ERROR_BYTES)
        code = self._library.farandole_create(ctypes.byref(options), ctypes.byref(pointer), error, ERROR_BYTES)
        if code != errors.OK or not pointer.value:
            raise errors.translate(code or errors.INTERNAL, error.value.decode(errors="replace"))
        return pointer.value

    @property
    def pointer(self) -> ctypes.c_void_p:
        """The core's object, for a pulse that guards it."""
        return self._pointer

    def _enter(self) -> None:
        """Before each call of the core, with _exit after it: close() waits for those under way."""
        self._calls.append(None)
        if self._closed or self._forked:
            self._calls.pop()
            if self._forked:
                raise errors.HorovodInternalError(
                    f"this process was forked from rank {self.rank}; the engine belongs to the parent process"
                )
            raise errors.ShutDown("Farandole has been shut down", rank=self.rank)

    def _exit(self) -> None:
        self._calls.pop()

    def _call(self, function: Any, *arguments: Any) -> Any:
        self._enter()
        try:
            return function(self._pointer, *arguments)
        finally:
            self._exit()

    def _checked(self, doing: str, function: Any, *arguments: Any) -> None:
        self._check(doing, self._call(function, *arguments))

    def _check(self, doing: str, code: int) -> None:
        if code != errors.OK:
            raise errors.translate(code, f"{doing} failed with code {code}", generation=self.generation)

    def _failure(self, code: int, error: ctypes.Array[ctypes.c_char]) -> Exception:
        return errors.translate(code, error.value.decode(errors="replace"), generation=self.generation)

    def submit(self, requests: Sequence[Request], bundle: bool = False, prompt: bool = False) -> list[int]:
        if not requests:
            return []
        count = len(requests)
        handles = _handles(count)()
        arena = arenas.borrow()
        held = False
        self._enter()
        try:
            base = pack(requests, arena)
            flags = bundle + 2 * prompt
            held = True
            code = self._submit(self._pointer, base, count, flags, handles, arena.error, ERROR_BYTES)
            if code != errors.OK:
                held = False
                raise self._failure(code, arena.error)
            result = handles[:]
            for handle, request in zip(result, requests, strict=True):
                self._pending[handle] = request
            held = False
            return result
        finally:
            if held:  # a signal handler has raised, and the core may use the memory
                self._abandoned.extend(requests)
            arenas.spare.append(arena)
            self._exit()

    def run(self, request: Request) -> Outcome:
        arena = arenas.borrow()
        try:
            arena.call(self._pointer.value or 0, pack((request,), arena), SLICE_MS)
            return self._go(arena, request) or Outcome(request.output)
        finally:
            arenas.spare.append(arena)

    def prepare(self, request: Request) -> Packed:
        return Packed(self._pointer.value or 0, request, SLICE_MS)

    def run_again(self, prepared: Packed, input_at: int, output_at: int, spans: Spans, *owners: Any) -> Outcome | None:
        prepared.move(input_at, output_at)
        return self._go(prepared.arena, prepared.request, spans, owners)

    def _go(self, arena: Arena, request: Request, spans: Spans | None = None, owners: Any = ()) -> Outcome | None:
        """Runs the call in the arena; None when its result lies where the request says."""
        held = True
        self._enter()
        try:
            code = self._run(arena.call_at)
            if code == errors.OK:
                held = False
                return None
            if code != errors.IN_PROGRESS and code != _TOLD:
                held = False
                raise self._failure(code, arena.error)
            if spans is not None:
                first, output = spans(*owners)
                request = replace(request, input=first, output=output)
            handle = arena.handle
            if code == _TOLD:
                held = False
                return self._told(handle, request, arena.outcome)
            self._pending[handle] = request
            held = False
        finally:
            if held:  # a signal handler has raised, and the core may still use the memory
                self._abandoned.append((request, spans and spans(*owners)))
            self._calls.pop()
        return self.wait(handle)

    def poll(self, handle: int, seconds: float = 0.0) -> bool:
        self._enter()
        try:
            if seconds > 0:
                self._ended(self._wait, handle, seconds)
            state: int = self._library.farandole_poll(self._pointer, handle)
        finally:
            self._exit()
        if state < 0 or handle not in self._pending:
            raise ValueError(f"there is no handle {handle}")
        return bool(state)

    def wait(self, handle: int, timeout: float | None = None, aside: bool = False) -> Outcome:
        self._enter()
        try:
            if self._ended(self._wait_aside if aside else self._wait, handle, timeout):
                return self._take(handle)
        finally:
            self._exit()
        request = self._pending.get(handle)
        what = "the operation" if request is None else f"{request.kind.name} {request.name or '(unnamed)'}"
        raise errors.FarandoleTimeout(f"{what} was not done after {timeout:g} s", seconds=timeout)

    def _ended(self, wait: Any, handle: int, timeout: float | None) -> bool:
        """Whether the operation has ended within `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        slice_ms = SLICE_MS
        while True:
            if deadline is not None:
                slice_ms = min(SLICE_MS, _milliseconds(deadline - time.monotonic()))
            code = wait(self._pointer, handle, slice_ms)
            if code == errors.OK:
                return True
            if code == errors.INVALID_ARGUMENT:
                raise ValueError(f"there is no handle {handle}")
            if self._closed:
                raise errors.ShutDown("Farandole has been shut down", rank=self.rank)
            if deadline is not None and time.monotonic() >= deadline:
                return False

    def next_completion(self) -> int:
        while True:
            handle: int = self._call(self._library.farandole_next_completion, SLICE_MS)
            if handle != 0:
                return handle

    def settle(self, memory: Span) -> None:
        owner = memory.owner
        self._library.farandole_settle(memory.address, owner.numel() * owner.element_size())

    def share(self, fd: int, address: int, size: int) -> int:
        copy = os.dup(fd)
        try:
            return int(self._call(self._library.farandole_share, copy, address, size))
        except errors.HorovodInternalError:  # the core has not taken it
            os.close(copy)
            raise

    def unshare(self, region: int) -> None:
        self._call(self._library.farandole_unshare, region)

    def _take(self, handle: int) -> Outcome:
        """The outcome of a finished operation."""
        # Of several threads that wait for one handle, who takes the request takes it all.
        request = self._pending.pop(handle, None)
        if request is None:
            raise ValueError(f"there is no handle {handle}")
        arena = arenas.borrow()
        try:
            if self._outcome_of(self._pointer, handle, arena.outcome_at) != errors.OK:
                raise ValueError(f"there is no handle {handle}")
            return self._told(handle, request, arena.outcome)
        finally:
            arenas.spare.append(arena)

    def _told(self, handle: int, request: Request, found: OutcomeStruct) -> Outcome:
        """The outcome that the core tells; the handle goes, unless its memory goes on loan."""
        on_loan = False
        try:
            if found.code != errors.OK:
                raise errors.translate(
                    found.code,
                    (found.message or b"").decode(errors="replace"),
                    rank=found.rank,
                    phase=(found.phase or b"").decode(errors="replace"),
                    generation=self.generation,
                    name=request.name or "",
                )
            outcome = Outcome(value=found.value)
            if found.splits_count:
                outcome.splits = found.splits[: found.splits_count]
            outcome.output = request.output
            if request.kind in ROWS_VARY and address(request.output) != (found.output or 0):
                shape = tuple(found.shape[: found.dimensions])
                on_loan = found.output_bytes > COPIED_BYTES
                outcome.output = self._received(handle, found, shape, request.elements(), on_loan)
            return outcome
        finally:
            if not on_loan:
                self._release(self._pointer, handle)

    def _received(
        self, handle: int, found: OutcomeStruct, shape: tuple[int, ...], dtype: DType, on_loan: bool
    ) -> Array:
        if on_loan:
            self._loans.add(handle)
            return np.asarray(_Loan(self, handle, found.output, shape, dtype))
        array = np.empty(shape, dtype=STORAGE[dtype])
        if array.nbytes:
            ctypes.memmove(address(array), found.output, array.nbytes)
        return array

    def _give_back(self, handle: int) -> None:
        if self._forked:
            return  # the memory belongs to the parent's engine
        # The loan itself keeps the core's object alive, also after close().
        self._release(self._pointer, handle)
        self._loans.discard(handle)
        self._destroy_if_unused()

    def _destroy_if_unused(self) -> None:
        if self._closed and not self._calls and not self._loans and self._listener is None:
            with contextlib.suppress(IndexError):  # somebody else was quicker
                self._library.farandole_destroy(self._undestroyed.pop())

    def add_link(self, peer: int, fd: int, kind: int) -> None:
        try:
            self._enter()
        except BaseException:
            os.close(fd)  # the core will never see it
            raise
        try:
            code = self._library.farandole_add_link(self._pointer, peer, fd, kind)
        finally:
            self._exit()
        self._check(f"the link to rank {peer}", code)

    def watch_links(self, wanted: Callable[[int], None]) -> None:
        self._wanted = wanted
        with contextlib.suppress(IndexError):  # the last one is taken
            while True:
                wanted(self._unanswered.pop())

    def start(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        # Listening begins first: the exchange itself may log, and may want links.
        self._listener = threading.Thread(target=self._listen, name=f"farandole-events-{self.rank}", daemon=True)
        self._listener.start()
        error = ctypes.create_string_buffer(ERROR_BYTES)
        while True:
            left = _milliseconds(deadline - time.monotonic())
            code = self._call(self._library.farandole_start, left, error, ERROR_BYTES)
            if code == errors.OK:
                return
            if code != errors.IN_PROGRESS or left == 0:
                raise self._failure(code if code != errors.IN_PROGRESS else errors.TIMED_OUT, error)

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
                self._unanswered.append(event.peer)
                if self._wanted is not None:
                    self.watch_links(self._wanted)
        except Exception:  # one bad event must not silence the ones after it
            _log.exception("an event of the engine could not be handled")

    def leave(self, linger: float = 2.0) -> None:
        self._checked("leaving", self._library.farandole_leave, _milliseconds(linger))

    def close(self) -> None:
        # Once more when a signal handler has ended the last attempt; not while another thread is at it.
        if self._forked or self._left or not self._closing.acquire(blocking=False):
            return
        try:
            self._close()
        finally:
            self._closing.release()

    def _close(self) -> None:
        self._closed = True
        self._library.farandole_leave(self._pointer, 0)
        while self._lent:
            self._lent.pop()(self._pointer)
        listener = self._listener
        if listener is not None:
            listener.join(_LISTENER_SECONDS)
            if listener.is_alive():
                # A leak is better than memory pulled from under the thread.
                _log.warning("the thread %s does not end; its engine is not freed", listener.name)
                return
        deadline = time.monotonic() + _LISTENER_SECONDS
        while self._calls:  # waits come back within their slice
            if time.monotonic() > deadline:
                # An exception out of a signal handler can leave an entry behind; a leak is better than a hang.
                _log.warning("calls of the engine do not end; it is not freed")
                return
            time.sleep(0.001)
        self._left = True
        self._listener = None
        self._pending.clear()
        self._destroy_if_unused()

    def serve(self, path: str) -> None:
        """Lets a framework's own operations, compiled into the library at `path`, use this engine until it ends."""
        operations = ctypes.CDLL(path)
        operations.farandole_ops_attach.argtypes = (POINTER, TEXT, INT, INT)
        operations.farandole_ops_serve.argtypes = (POINTER,)
        self._enter()
        if operations.farandole_ops_attach(self._pointer, self._library._name.encode(), self.rank, self.size):
            self._exit()
            raise errors.LibraryMissing(f"the operations in {path} do not fit the native library")

        def serve() -> None:
            try:
                operations.farandole_ops_serve(self._pointer)
            finally:
                self._exit()

        threading.Thread(target=serve, name=f"farandole-operations-{self.rank}", daemon=True).start()

    def lend(self, path: str) -> None:
        """Lets calls of a framework, compiled into the library at `path`, use this engine until it is closed."""
        library = calls(path)
        library.farandole_calls_attach.argtypes = (POINTER, TEXT)
        library.farandole_calls_detach.argtypes = (POINTER,)
        if library.farandole_calls_attach(self._pointer, self._library._name.encode()):
            raise errors.LibraryMissing(f"the calls in {path} do not fit the native library")
        self._lent.append(library.farandole_calls_detach)

    def revoke(self, code: int, rank: int, message: str) -> None:
        self._checked("revoking", self._library.farandole_revoke, code, rank, message.encode())

    def counter(self, name: str) -> int:
        return int(self._call(self._library.farandole_counter, COUNTERS.index(name)))

    def tuning(self) -> list[int]:
        values = (LONG * 5)()
        self._checked("reading the tuning", self._library.farandole_tuning, values)
        return values[:]

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


_engines: weakref.WeakSet[NativeEngine] = weakref.WeakSet()


def _mark_forked() -> None:
    for engine in list(_engines):
        engine._forked = True


os.register_at_fork(after_in_child=_mark_forked)
