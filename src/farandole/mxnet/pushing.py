# Collectives as operations of MXNet's own engine, which starts them when their arrays are ready.
# Touches MXNet's C interface, engine, errors, pending and runtime. The only file of the binding that sees C.
"""`push` hands a collective to MXNet. No thread of MXNet waits for it: whoever is called only submits the requests.

MXNet calls `_start` on one of its threads when everything that was pushed before on the same arrays is done. When the
engine of this package is done too, a thread of ours tells MXNet, which then lets go what waits for the results. An
error goes the same way: MXNet keeps it with the arrays and raises it when somebody waits for them.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from .. import errors
from ..engine import Engine, Kind, Outcome, Request, Span
from ..pending import Beginning
from ..runtime import World, runtime
from .framework import mx, onednn_built

DRAIN_S = 10.0  # for operations that have begun, before this process forks or leaves
_CPU_PRIORITIZED = ctypes.c_int(3)  # mxnet::FnProperty: on threads of its own, so that no computation is in the way
_ERROR_BYTES = 64  # more than std::runtime_error has


class _OnComplete(ctypes.Structure):
    """mxnet::engine::CallbackOnComplete"""

    _fields_ = [("callback", ctypes.c_void_p), ("engine", ctypes.c_void_p), ("param", ctypes.c_void_p)]


class _Context(ctypes.Structure):
    """mxnet::Context"""

    _fields_ = [("kind", ctypes.c_int32), ("number", ctypes.c_int32)]


_CPU = _Context(1, 0)
_StartFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_GoneFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_DoneFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)

_mxnet = mx.base._LIB
# dmlc::Error is a std::runtime_error, and nothing more; MXNet takes a copy.
_runtime = ctypes.CDLL("libstdc++.so.6")
_make_error = _runtime["_ZNSt13runtime_errorC1EPKc"]
_make_error.argtypes, _make_error.restype = (ctypes.c_void_p, ctypes.c_char_p), None
_unmake_error = _runtime["_ZNSt13runtime_errorD1Ev"]
_unmake_error.argtypes, _unmake_error.restype = (ctypes.c_void_p,), None


class Flight:
    """One collective call on its way."""

    __slots__ = ("begun", "done", "failure", "left", "outcomes", "quiet", "submitted", "traffic")

    def __init__(self, begun: Beginning, traffic: Traffic, quiet: bool) -> None:
        self.begun = begun
        self.traffic = traffic
        self.quiet = quiet  # somebody waits for the outcomes, and is told of errors
        self.done: _OnComplete | None = None  # what MXNet wants to hear
        self.submitted = False
        self.left = len(begun.requests)
        self.outcomes: dict[int, Outcome] = {}  # by handle, and handles count up
        self.failure: BaseException | None = None

    def locate(self) -> None:
        """Fills in where the arrays lie: only now are they sure to stay there."""
        for request in self.begun.requests:
            for span in (request.input, request.output):
                if isinstance(span, Span):
                    span.address = _address(span.owner)

    def land(self) -> None:
        """Tells MXNet."""
        done, failure = self.done, self.failure
        assert done is not None
        tell = _DoneFunction(done.callback)
        if failure is None or self.quiet:
            tell(done.engine, done.param, None)
            return
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        _make_error(error, _written(failure).encode(errors="replace"))
        try:
            tell(done.engine, done.param, ctypes.addressof(error))
        finally:
            _unmake_error(error)


class Traffic:
    """What this binding has under way in one world."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._queue = engine.open_queue()
        self._changed = threading.Condition()
        self._flights: set[Flight] = set()
        self._handles: dict[int, Flight] = {}
        # MXNet may start operations in another order than they were pushed: names keep unnamed ones apart.
        self._unnamed: defaultdict[tuple[int, Kind], Iterator[int]] = defaultdict(lambda: itertools.count(1))
        self.failure: BaseException | None = None  # that ended this world
        threading.Thread(target=self._serve, name=f"farandole-mxnet-{engine.rank}", daemon=True).start()

    def enter(self, begun: Beginning, quiet: bool) -> Flight:
        """A new flight, counted until MXNet has forgotten it."""
        for request in begun.requests:
            if request.name is None:
                number = next(self._unnamed[request.group, request.kind])
                request.name = f"{request.kind.name.lower()}.noname.mxnet.{number}"
        flight = Flight(begun, self, quiet)
        with self._changed:
            self._flights.add(flight)
        return flight

    def begin(self, flight: Flight) -> None:
        """Submits the requests; on a thread of MXNet, so that nothing may be raised."""
        try:
            flight.locate()
            with self._changed:  # whoever is told of a handle must find it
                handles = self._engine.submit(flight.begun.requests, flight.begun.bundle, queue=self._queue)
                self._handles.update(dict.fromkeys(handles, flight))
                flight.submitted = True
                self._changed.notify_all()
        except BaseException as error:
            self._fail(flight, error)
            flight.land()

    def leave(self, flight: Flight) -> None:
        """MXNet has forgotten it: it is done, or was never started because of an error before it."""
        with self._changed:
            self._flights.discard(flight)
            self._changed.notify_all()

    def wait(self, flight: Flight) -> list[Outcome]:
        """For a flight whose outcomes somebody wants."""
        with self._changed:
            self._changed.wait_for(lambda: flight not in self._flights)
        if flight.failure is not None:
            raise flight.failure
        return [flight.outcomes[handle] for handle in sorted(flight.outcomes)]

    def count_anew(self) -> None:
        """All have joined: unnamed operations of all ranks begin with the same number again, as the core's do."""
        with self._changed:
            for group, kind in list(self._unnamed):
                if group == 0:
                    del self._unnamed[group, kind]

    def drain(self, seconds: float, submitted: bool = False) -> None:
        """Waits until nothing is under way, or until the engine has all that was pushed."""
        with self._changed:
            self._changed.wait_for(lambda: all(submitted and flight.submitted for flight in self._flights), seconds)

    def _fail(self, flight: Flight, error: BaseException) -> None:
        flight.failure = flight.failure or error
        if isinstance(error, errors.HorovodInternalError) and not isinstance(error, errors.Mismatch):
            self.failure = self.failure or error

    def _serve(self) -> None:
        try:
            while (handle := self._engine.next_completion(self._queue)) >= 0:
                with self._changed:
                    flight = self._handles.pop(handle, None)
                if flight is not None:
                    self._take(flight, handle)
        except errors.HorovodInternalError:
            pass  # the engine has been closed
        with self._changed:
            left, self._handles = self._handles, {}
        for handle, flight in left.items():
            self._take(flight, handle)

    def _take(self, flight: Flight, handle: int) -> None:
        try:
            flight.outcomes[handle] = self._engine.wait(handle, 0.0)
        except Exception as error:
            self._fail(flight, error)
        flight.left -= 1
        if flight.left == 0:
            flight.land()


_worlds: WeakKeyDictionary[World, Traffic] = WeakKeyDictionary()
_opening = threading.Lock()
_flights: dict[int, Flight] = {}  # by the number that MXNet gives back
_numbers = itertools.count(1)


def traffic_of(world: World) -> Traffic:
    """What is under way in this world. Raises what has ended it, if something has."""
    traffic = _worlds.get(world) or _new_traffic(world)
    if traffic.failure is not None:
        raise traffic.failure
    return traffic


def _new_traffic(world: World) -> Traffic:
    with _opening:
        if world not in _worlds:
            _worlds[world] = Traffic(world.engine)
            # Again and again, so that it comes before whatever init has registered to leave the job.
            atexit.unregister(_drain)
            atexit.register(_drain)
        return _worlds[world]


def push(begun: Beginning, priority: int, quiet: bool = False) -> Flight:
    """Hands the requests to MXNet: they begin when their arrays are ready. `quiet`: somebody waits for the outcomes."""
    traffic = traffic_of(begun.world)
    written = _arrays(begun.requests, "output")
    read = {chunk: array for chunk, array in _arrays(begun.requests, "input").items() if chunk not in written}
    for request in begun.requests:
        if request.input is not None:
            _unfold(request.input.owner)
    flight = traffic.enter(begun, quiet)
    number = next(_numbers)
    _flights[number] = flight
    mx.base.check_call(
        _mxnet.MXEnginePushAsyncND(
            _start_function,
            ctypes.c_void_p(number),
            _gone_function,
            ctypes.byref(_CPU),
            *_listed(read),
            *_listed(written),
            ctypes.byref(_CPU_PRIORITIZED),
            ctypes.c_int(priority),
            f"farandole {begun.requests[0].kind.name.lower()}".encode(),
            ctypes.c_bool(False),
        )
    )
    return flight


def wait(flight: Flight) -> list[Outcome]:
    """The outcomes of a quiet flight."""
    outcomes = flight.traffic.wait(flight)
    if not outcomes:  # MXNet has not even started it: an input could not be computed
        for request in flight.begun.requests:
            request.input.owner.wait_to_read()
        raise errors.HorovodInternalError("MXNet did not start the operation, and does not say why")
    return outcomes


def drain(submitted: bool = False) -> None:
    """Waits until what has begun is done, or at least (`submitted`) in the hands of the engine."""
    traffic = _worlds.get(runtime.world)
    if traffic is not None:
        traffic.drain(DRAIN_S, submitted)


def _drain() -> None:
    for traffic in list(_worlds.values()):
        traffic.drain(DRAIN_S)


# --- MXNet's side ----------------------------------------------------------------------------------------------------


def _start(_context: Any, done: Any, number: int) -> None:
    flight = _flights[number]
    flight.done = _OnComplete.from_buffer_copy(ctypes.string_at(done, ctypes.sizeof(_OnComplete)))
    flight.traffic.begin(flight)


def _gone(number: int) -> None:
    flight = _flights.pop(number)
    flight.traffic.leave(flight)


_start_function, _gone_function = _StartFunction(_start), _GoneFunction(_gone)


def _arrays(requests: Sequence[Request], which: str) -> dict[int, Any]:
    """The arrays of the requests by what MXNet orders them by: views of one array count as one."""
    spans = [span for request in requests if isinstance(span := getattr(request, which), Span)]
    # The first member of mxnet::NDArray is the pointer to the memory that views share.
    return {ctypes.c_void_p.from_address(span.owner.handle.value).value or 0: span.owner for span in spans}


def _listed(arrays: dict[int, Any]) -> tuple[Any, Any]:
    handles = [array.handle for array in arrays.values()]
    return (ctypes.c_void_p * len(handles))(*handles), ctypes.c_int(len(handles))


def _address(array: Any) -> int:
    pointer = ctypes.c_void_p()
    mx.base.check_call(_mxnet.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    return pointer.value or 0


def _unfold(array: Any) -> None:
    """oneDNN's operations leave arrays in layouts of their own: has MXNet bring it back to rows, when it is ready."""
    if not _FOLDS or array.ndim < 2:
        return
    if _reorder is not None:
        _reorder(array.handle)  # one more operation for MXNet's engine, and nothing to wait for
    else:
        array.wait_to_read()
        _address(array)  # brings it back itself, but must not be asked while others write


_FOLDS = onednn_built()
# mxnet::NDArray::Reorder2DefaultAsync() const
_reorder = getattr(_mxnet, "_ZNK5mxnet7NDArray20Reorder2DefaultAsyncEv", None)
if _reorder is not None:
    _reorder.argtypes, _reorder.restype = (ctypes.c_void_p,), None
# MXNet ends its threads for a fork and waits for them, while the one that forks keeps them from running Python.
# In the child nothing is under way.
os.register_at_fork(before=_drain, after_in_child=_worlds.clear)


# --- errors ----------------------------------------------------------------------------------------------------------

_KINDS: dict[str, Callable[[str], BaseException]] = {
    f"farandole.{kind.__name__}": kind
    for kind in (
        errors.HorovodInternalError,
        errors.PeerLost,
        errors.Revoked,
        errors.ShutDown,
        errors.Mismatch,
        errors.FarandoleTimeout,
        ValueError,
        MemoryError,
    )
}
_recent: deque[tuple[str, BaseException]] = deque(maxlen=64)


def _written(failure: BaseException) -> str:
    """The text that MXNet keeps with the arrays, from which `_revived` makes the error again."""
    name = f"farandole.{type(failure).__name__}"
    text = f"{name if name in _KINDS else 'farandole.HorovodInternalError'}: {failure}"
    _recent.append((text, failure))
    return text


def _revived(text: str) -> BaseException:
    for known, failure in reversed(_recent):
        if known == text:
            return failure
    name, _, message = text.partition(": ")
    return _KINDS[name](message)


for _name in _KINDS:
    mx.base.register_error(_name, _revived)
