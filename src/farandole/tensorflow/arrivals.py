# Nodes that wait without a thread of TensorFlow: an operation registered through TensorFlow's C interface, no compiler.
# Touches TensorFlow's library through ctypes, native, a thread of its own, and work.
"""A ticket stands for work that is under way; `arrived(ticket)` is a node that ends when the work has.

TensorFlow runs what is ready on few threads. A callback that waits keeps one of them from the very operations that
other ranks wait for; here one thread of Python waits for all, and TensorFlow's are told when something is done.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from .. import errors
from ..engine import Array
from ..native import NativeEngine
from ..work import Work, begin, results
from .framework import tf

_OPERATION = "FarandoleArrival"
_FAILED = 13  # TF_INTERNAL
_MANAGER, _DESTROY = 2, 3  # of libstdc++'s std::function: which word, and what it is told to do
_LIBSTDCXX = "_ZSt25__throw_bad_function_callv"
_manage = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)

_log = logging.getLogger("farandole")


class _Entry:
    """Work behind a ticket: what it waits for, and whom to tell."""

    def __init__(self, give: Callable[[], list[Array]]) -> None:
        self.give = give
        self.left = 0  # requests that are still under way
        self.tell: Callable[[], None] | None = None


class Tickets:
    """Work under way, by number: begun by one node, watched beside the graph, fetched by another node."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._entries: dict[int, _Entry] = {}
        self._handles: dict[int, _Entry] = {}  # of the watched engine
        self._watched: Any = None
        self._queue = 0  # of its completions

    def begin(self, work: Work, arrays: Sequence[Array], splits: Any) -> int:
        """Submits the work and gives its ticket; errors are kept for whoever fetches the results."""
        try:
            begun = begin("tensorflow", work, arrays, splits)
            entry = _Entry(lambda: results(work, begun))
            # One lock for all: a completion must find what it belongs to.
            with self._lock:
                watched = self._watch(begun.world.engine)
                handles = begun.under_way(self._queue if watched else 0)
                if watched:
                    entry.left = len(handles)
                    self._handles.update(dict.fromkeys(handles, entry))
        except Exception as error:
            entry = _Entry(functools.partial(_fail, error))
        ticket = next(self._numbers)
        self._entries[ticket] = entry
        return ticket

    def when_done(self, ticket: int, tell: Callable[[], None]) -> None:
        """Calls `tell` when the results are there, or the error."""
        entry = self._entries[ticket]
        with self._lock:
            if entry.left:
                entry.tell = tell
                return
        tell()

    def fetch(self, ticket: int) -> list[Array]:
        """The results; waits for them where nobody has."""
        return self._entries.pop(ticket).give()

    def _watch(self, engine: Any) -> bool:
        """Whether somebody looks for what this engine completes; the engine in Python cannot be watched."""
        if not isinstance(engine, NativeEngine):
            return False
        if self._watched is not engine:
            self._watched, self._handles, self._queue = engine, {}, engine.open_queue()
            threading.Thread(
                target=self._look, args=(engine, self._queue, self._handles), name="farandole-arrivals", daemon=True
            ).start()
        return True

    def _look(self, engine: NativeEngine, queue: int, entries: dict[int, _Entry]) -> None:
        with contextlib.suppress(errors.ShutDown):
            while (handle := engine.next_completion(queue)) >= 0:
                with self._lock:
                    entry = entries.pop(handle)
                    entry.left -= 1
                    tell = entry.tell if entry.left == 0 else None
                if tell is not None:
                    tell()
        with self._lock:
            rest = set(entries.values())
            for entry in rest:
                entry.left = 0
        for entry in rest:
            if entry.tell is not None:
                entry.tell()  # the fetching node says what happened


def _fail(error: Exception) -> list[Array]:
    raise error


tickets = Tickets()
_registering = threading.Lock()
_kept: list[Any] = []  # what TensorFlow's library calls must not be collected


def arrived(ticket: Any) -> Any:
    """The same ticket, when its work has ended; at once where TensorFlow's library has no such door."""
    if not _registered():
        return ticket
    graph = tf.compat.v1.get_default_graph()
    with tf.device("/CPU:0"):
        node = graph.create_op(_OPERATION, [ticket], [tf.int64], name=_OPERATION)
    node.outputs[0].set_shape([])
    return node.outputs[0]


def _registered() -> bool:
    """Whether TensorFlow knows the operation; the first call makes it known."""
    with _registering:
        if not _kept:
            try:
                _kept.append(_register())
            except (OSError, AttributeError, RuntimeError) as error:
                _log.warning("callbacks wait in TensorFlow's own threads: %s", error)
                _kept.append(None)
    return _kept[0] is not None


def _library() -> Any:
    folder = tf.sysconfig.get_lib()
    name = next(flag for flag in tf.sysconfig.get_link_flags() if flag.startswith("-l:")).removeprefix("-l:")
    library = ctypes.CDLL(os.path.join(folder, name))
    getattr(library, _LIBSTDCXX)  # AttributeError: another library of C++, whose functions look different
    return library


def _typed(library: Any, name: str, *arguments: Any, result: Any = None) -> Any:
    function = getattr(library, name)
    function.argtypes, function.restype = arguments, result
    return function


class _Doors:
    """The functions of TensorFlow's C interface that are used here."""

    def __init__(self, library: Any) -> None:
        at, text, whole = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
        self.new_status = _typed(library, "TF_NewStatus", result=at)
        self.delete_status = _typed(library, "TF_DeleteStatus", at)
        self.set_status = _typed(library, "TF_SetStatus", at, whole, text)
        self.code = _typed(library, "TF_GetCode", at, result=whole)
        self.message = _typed(library, "TF_Message", at, result=text)
        self.new_operation = _typed(library, "TF_NewOpDefinitionBuilder", text, result=at)
        self.add_input = _typed(library, "TF_OpDefinitionBuilderAddInput", at, text)
        self.add_output = _typed(library, "TF_OpDefinitionBuilderAddOutput", at, text)
        self.set_shapes = _typed(library, "TF_OpDefinitionBuilderSetShapeInferenceFunction", at, at)
        self.unknown_shape = _typed(library, "TF_ShapeInferenceContextSetUnknownShape", at, at)
        self.register_operation = _typed(library, "TF_RegisterOpDefinition", at, at)
        self.new_kernel = _typed(library, "TF_NewAsyncKernelBuilder", text, text, at, at, at, result=at)
        self.register_kernel = _typed(library, "TF_RegisterKernelBuilder", text, at, at)
        self.get_input = _typed(library, "TF_GetInput", at, whole, ctypes.POINTER(at), at)
        self.data = _typed(library, "TF_TensorData", at, result=at)
        self.delete_tensor = _typed(library, "TF_DeleteTensor", at)
        self.set_output = _typed(library, "TF_SetOutput", at, whole, at, at)
        self.fail = _typed(library, "TF_OpKernelContext_Failure", at, at)
        self.done = _typed(library, "TF_RunAsyncOpKernelDoneCallback", at)

    def checked(self, call: Callable[[Any], Any]) -> None:
        """Calls with a status; RuntimeError when it says that something went wrong."""
        status = self.new_status()
        try:
            call(status)
            if self.code(status) != 0:
                raise RuntimeError(self.message(status).decode(errors="replace"))
        finally:
            self.delete_status(status)


def _register() -> list[Any]:
    """Makes the operation known; gives what has to stay."""
    doors = _Doors(_library())
    at = ctypes.c_void_p
    compute = ctypes.CFUNCTYPE(None, at, at, at)(lambda _, context, done: _compute(doors, context, done))
    create = ctypes.CFUNCTYPE(at, at)(lambda _: None)
    delete = ctypes.CFUNCTYPE(None, at)(lambda _: None)
    shapes = ctypes.CFUNCTYPE(None, at, at)(doors.unknown_shape)
    operation = doors.new_operation(_OPERATION.encode())
    doors.add_input(operation, b"ticket: int64")
    doors.add_output(operation, b"arrived: int64")
    doors.set_shapes(operation, ctypes.cast(shapes, at))
    doors.checked(lambda status: doors.register_operation(operation, status))
    functions = [ctypes.cast(one, at) for one in (create, compute, delete)]
    kernel = doors.new_kernel(_OPERATION.encode(), b"CPU", *functions)
    doors.checked(lambda status: doors.register_kernel(_OPERATION.encode(), kernel, status))
    return [doors, compute, create, delete, shapes]


class _Done:
    """What ends a node, taken over from TensorFlow.

    The C interface gives the address of a std::function that lives only as long as the call. Moved as libstdc++ moves
    it, four words and then an empty manager, it lives until the work is done.
    """

    def __init__(self, doors: _Doors, given: int) -> None:
        self._doors = doors
        self._words = (ctypes.c_uint64 * 4).from_buffer_copy((ctypes.c_uint64 * 4).from_address(given))
        ctypes.c_uint64.from_address(given + _MANAGER * 8).value = 0

    def __call__(self) -> None:
        where = ctypes.addressof(self._words)
        self._doors.done(where)
        _manage(self._words[_MANAGER])(where, where, _DESTROY)


def _compute(doors: _Doors, context: Any, done: Any) -> None:
    """On a thread of TensorFlow: passes the ticket on, and lets a thread of ours end the node."""
    tensor, ended = ctypes.c_void_p(), _Done(doors, done)
    try:
        doors.checked(lambda status: doors.get_input(context, 0, ctypes.byref(tensor), status))
        ticket = ctypes.c_int64.from_address(doors.data(tensor)).value
        doors.checked(lambda status: doors.set_output(context, 0, tensor, status))
        doors.delete_tensor(tensor)
        tickets.when_done(ticket, ended)
    except Exception as error:
        status = doors.new_status()
        doors.set_status(status, _FAILED, f"HorovodInternalError: {error}".encode())
        doors.fail(context, status)
        doors.delete_status(status)
        ended()
