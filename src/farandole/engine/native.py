# The native engine: the core behind the Engine protocol.
# Touches config, events, interface, library, observe and the extension.
"""Makes engines from the settings, gives compiled operations of frameworks access to them, and closes them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..base.config import ALGORITHMS, Config
from ..observe import records
from .events import EventThread
from .interface import COUNTERS, Span
from .library import IMPORT_FAILURE, load

_CALLS_SECONDS = 10.0  # for calls of other threads to return

_log = logging.getLogger("farandole")

if TYPE_CHECKING or IMPORT_FAILURE is None:
    from . import bridge
    from .bridge import Engine as _Engine
else:
    _Engine = object  # load() says what is missing, before an engine is made


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
        self._detach: list[Callable[[], None]] = []  # each ends the use of this engine by a framework's compiled calls
        self._closing = threading.Lock()
        self._events = EventThread()
        checked = not config.stall_check_disable
        shutdown = config.stall_shutdown_time_seconds
        if shutdown < config.stall_check_time_seconds:
            shutdown = 0.0  # Horovod ignores a shutdown time below the warning time
        self._record = records.inherited(config.record_fd)
        note = config.stall_note_seconds if checked else 0.0
        main = threading.main_thread().ident or 0
        self._record.introduce(os.getpid(), main, note, config.stall_check_time_seconds if checked else 0.0)
        try:
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
                # An agent that has the record says more, and once for all ranks.
                stall_note_ms=0 if self._record.shared else _milliseconds(note),
                stall_warning_ms=_milliseconds(config.stall_check_time_seconds) if checked else 0,
                stall_shutdown_ms=_milliseconds(shutdown) if checked else 0,
                slot_bytes=config.slot_bytes,
                slots=config.slots,
                fuse_bundles=0 if config.disable_group_fusion else 1,
                chunk_bytes=config.chunk_bytes,
                tcp_streams=config.tcp_streams,
                record=self._record.fd,
            )
        except BaseException:
            self._record.close()
            raise

    def use_huge_pages(self, memory: Span) -> None:
        owner = memory.owner
        self.library.use_huge_pages(memory.address, owner.numel() * owner.element_size())

    def watch_links(self, wanted: Callable[[int], None]) -> None:
        self._events.watch_links(wanted)

    def start(self, timeout: float) -> None:
        # The event thread starts first, because start() may log and may request links.
        self._events.start(self.next_event, f"farandole-events-{self.rank}")
        super().start(timeout)

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
        while self._detach:
            self._detach.pop()()
        if not self._events.join():
            # A leak is better than freeing memory that the thread still uses.
            _log.warning("the thread farandole-events-%d does not end; its engine is not freed", self.rank)
            return
        deadline = time.monotonic() + _CALLS_SECONDS
        while self.calls:  # waiting calls return within 100 ms
            if time.monotonic() > deadline:
                _log.warning("calls of the engine do not end; it is not freed")
                return
            time.sleep(0.001)
        self.free()
        self._record.close()

    def serve(self, path: str) -> None:
        """Lets a framework's own operations, compiled into the library at `path`, use this engine until it ends."""
        operations = bridge.Operations(path, self)
        threading.Thread(target=operations.serve, name=f"farandole-operations-{self.rank}", daemon=True).start()

    def lend(self, path: str) -> None:
        """Lets calls of a framework, compiled into the library at `path`, use this engine until it is closed."""
        self._detach.append(bridge.Operations(path, self).detach)

    def record(self) -> bytes:
        """The last operations of this rank, for `farandole.observe.records.read`."""
        return self._record.bytes()

    def counter(self, name: str) -> int:
        return self.count(COUNTERS.index(name))
