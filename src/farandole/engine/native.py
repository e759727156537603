# The native engine: the core, opened by the extension module (core/python/), behind the Engine protocol.
# Touches config, engine, errors, version and the extension.
"""Opens the native library, makes engines from the settings, handles their events, and closes them."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

from ..base import errors
from ..base.config import ALGORITHMS, Config
from ..base.version import package_version
from .interface import COUNTERS, STORAGE, DType, Kind, ReduceOp, Span

LIBRARY = Path(__file__).with_name("_native") / "libfarandole.so"
_LISTENER_SECONDS = 10.0  # for a link request in progress
_FALLBACK = "FARANDOLE_ENGINE=python selects the slow engine that needs no library."

_log = logging.getLogger("farandole")


def _numbers() -> dict[str, dict[str, int]]:
    """Python's copies of the numbers of the C interface (core/api/farandole.h)."""
    names = ("OK", "IN_PROGRESS", "INVALID_ARGUMENT", "PRECONDITION", "ABORTED", "SHUT_DOWN", "PEER_LOST", "REVOKED")
    codes = {name: int(getattr(errors, name)) for name in (*names, "TIMED_OUT", "NO_MEMORY", "INTERNAL")}
    enums: tuple[type[IntEnum], ...] = (Kind, DType, ReduceOp)
    return {
        **{kind.__name__: {one.name: one.value for one in kind} for kind in enums},
        "Code": codes,
        "Algorithm": {name.upper(): number for number, name in enumerate(ALGORITHMS)},
        "bytes": {dtype.name: STORAGE[dtype].itemsize for dtype in DType},
    }


def check_numbers(theirs: dict[str, dict[str, int]]) -> None:
    """ImportError when the extension was compiled for other numbers than the package has; it says which."""
    ours = _numbers()
    differ = [
        f"{table}.{name} is {ours.get(table, {}).get(name)} here and {theirs.get(table, {}).get(name)} there"
        for table in sorted({*ours, *theirs})
        for name in sorted({*ours.get(table, {}), *theirs.get(table, {})})
        if ours.get(table, {}).get(name) != theirs.get(table, {}).get(name)
    ]
    if differ:
        raise ImportError(f"it has another build than the package: {'; '.join(differ[:3])}. Install farandole again")


try:
    from . import bridge

    check_numbers(getattr(bridge, "NUMBERS", {}))
    _missing: ImportError | None = None
except ImportError as error:  # reported when an engine is needed; the engine in Python needs no extension
    _missing = error

if TYPE_CHECKING:
    from .bridge import Engine as _Engine
else:
    _Engine = object if _missing is not None else bridge.Engine


@functools.cache
def load(path: str | None = None) -> bridge.Library:
    """The core in the native library, of the build of this package; LibraryMissing says how to get it."""
    place = Path(path) if path else LIBRARY
    build = "In a checkout, build it with `cmake -B build -S . && cmake --build build -j`."
    if not place.exists():
        raise errors.LibraryMissing(f"the native library {place} does not exist. {build} {_FALLBACK}")
    if _missing is not None:
        raise errors.LibraryMissing(f"the extension module cannot be used: {_missing}. {build} {_FALLBACK}")
    try:
        library = bridge.Library(str(place))
    except ImportError as error:
        raise errors.LibraryMissing(
            f"the native library {place} cannot be used: {error}. Install farandole again. {build} {_FALLBACK}"
        ) from None
    found, expected = library.version, package_version()
    if found != expected:
        raise errors.LibraryMissing(
            f"the native library {place} is version {found}, the package is {expected}: rebuild it. {_FALLBACK}"
        )
    return library


def _milliseconds(seconds: float) -> int:
    return max(0, round(seconds * 1000))


class NativeEngine(_Engine):
    """The Engine protocol over the core. One object is one rank; a process may hold several."""

    supports_pieces = True

    def __init__(self, config: Config, rank: int, hosts: Sequence[int], generation: int = 0) -> None:
        """`hosts` has a host number for each rank of the job: ranks with one number share memory."""
        self.rank = rank
        self.size = len(hosts)
        self.library = load(config.library)
        # functions that end the use of this engine by compiled framework calls
        self._lent_to: list[Callable[[], None]] = []
        self._closing = threading.Lock()
        self._wanted: Callable[[int], None] | None = None
        self._unanswered: list[int] = []
        self._listener: threading.Thread | None = None
        checked = not config.stall_check_disable
        shutdown = config.stall_shutdown_time_seconds
        if shutdown < config.stall_check_time_seconds:
            shutdown = 0.0  # the contract's rule
        super().__init__(
            self.library,
            rank,
            hosts,
            generation,
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

    def use_huge_pages(self, memory: Span) -> None:
        owner = memory.owner
        self.library.use_huge_pages(memory.address, owner.numel() * owner.element_size())

    def watch_links(self, wanted: Callable[[int], None]) -> None:
        self._wanted = wanted
        with contextlib.suppress(IndexError):  # the last one is taken
            while True:
                wanted(self._unanswered.pop())

    def start(self, timeout: float) -> None:
        # The event thread starts first, because start() may log and may request links.
        self._listener = threading.Thread(target=self._listen, name=f"farandole-events-{self.rank}", daemon=True)
        self._listener.start()
        super().start(timeout)

    def _listen(self) -> None:
        while (event := self.next_event()) is not None:
            try:
                self._handle(*event)
            except Exception:  # one failed event must not stop the later ones
                _log.exception("an event of the engine could not be handled")

    def _handle(self, kind: int, peer: int, level: int, text: str) -> None:
        if kind == 2:
            _log.log(level, "%s", text)
        elif kind == 1:
            self._unanswered.append(peer)
            if self._wanted is not None:
                self.watch_links(self._wanted)

    def close(self) -> None:
        # Runs again if a signal handler interrupted the last attempt; not while another thread closes.
        if self.forked or self.freed or not self._closing.acquire(blocking=False):
            return
        try:
            self._close()
        finally:
            self._closing.release()

    def _close(self) -> None:
        self.stop()
        while self._lent_to:
            self._lent_to.pop()()
        listener = self._listener
        if listener is not None:
            listener.join(_LISTENER_SECONDS)
            if listener.is_alive():
                # A leak is better than freeing memory that the thread still uses.
                _log.warning("the thread %s does not end; its engine is not freed", listener.name)
                return
        deadline = time.monotonic() + _LISTENER_SECONDS
        while self.calls:  # waiting calls return within 100 ms
            if time.monotonic() > deadline:
                _log.warning("calls of the engine do not end; it is not freed")
                return
            time.sleep(0.001)
        self._listener = None
        self.free()

    def serve(self, path: str) -> None:
        """Lets a framework's own operations, compiled into the library at `path`, use this engine until it ends."""
        operations = bridge.Operations(path, self)
        threading.Thread(target=operations.serve, name=f"farandole-operations-{self.rank}", daemon=True).start()

    def lend(self, path: str) -> None:
        """Lets calls of a framework, compiled into the library at `path`, use this engine until it is closed."""
        self._lent_to.append(bridge.Operations(path, self).detach)

    def counter(self, name: str) -> int:
        return self.count(COUNTERS.index(name))


def start_heartbeat(mine: int, theirs: int | None, beat_ms: int, library: str | None = None) -> bridge.Heartbeat:
    """Starts a native thread that writes heartbeats into one memory file and watches the agent's in another."""
    return bridge.Heartbeat(load(library), mine, -1 if theirs is None else theirs, beat_ms)
