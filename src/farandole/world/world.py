# The world of this process: what exists from init to shutdown, and the requests behind users' handles.
# Touches config, engine, errors, groups, observe and tuning.
"""`World` holds the engine, the session with the other ranks, the process sets and the pending handles."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..base import errors
from ..base.config import Config, cache_directory, names_of_set
from ..engine.interface import Engine, Outcome
from .groups import GroupTable
from .observe.timeline import Timeline

if TYPE_CHECKING:
    from ..clusters.join import ClusterSession
    from ..rendezvous.session import Session
    from .tuning.live import Tuner

LEAVE_S = 2.0  # seconds that shutdown gives to bytes in flight

_log = logging.getLogger("farandole")


@dataclass
class Pending:
    """Submitted requests with one user's handle, and how their outcomes become the result."""

    handles: list[int]
    finish: Callable[[list[Outcome]], Any]
    outcomes: list[Outcome] = field(default_factory=list)
    failure: Exception | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)  # several threads may wait for one handle

    def submitted(self) -> bool:
        """Whether the engine has the requests; a copy from the device may still be running."""
        return True


class World:
    """Everything that exists from init to shutdown."""

    def __init__(self, config: Config, engine: Engine, session: Session, cluster: ClusterSession | None = None) -> None:
        self.config = config
        self.engine = engine
        self.session = session
        self.cluster = cluster  # of a job that another launcher started
        self.groups = GroupTable(engine)
        self.timeline: Timeline | None = None
        self.tuner: Tuner | None = None  # on rank 0 of a job with autotune
        self.handles: dict[int, Pending] = {}
        self.repeats: dict[Any, Any] = {}  # operations that scripts call repeatedly (operations/repeats.py)
        self.joins = 0  # calls of join(); all ranks have made as many when they train together
        self.exchanged = False  # a call of the script has exchanged more than a few numbers, other than a broadcast
        self._numbers = itertools.count(1)

    def add_handle(self, pending: Pending) -> int:
        """Adds a handle for a user; handles count up from 1."""
        handle = next(self._numbers)
        self.handles[handle] = pending
        return handle

    def trace(self, path: str, mark_cycles: bool) -> None:
        """Writes the timeline to `path` from now on."""
        self.stop_trace()
        try:
            self.timeline = Timeline(self.engine, path, mark_cycles)
        except OSError as error:
            if self.engine.rank == 0:
                raise
            # Only rank 0 opens the file in Horovod, so scripts may make its folder there alone.
            _log.warning("rank %d writes no timeline: %s", self.engine.rank, error)

    def begin_timeline(self) -> None:
        """Starts the timeline that the settings ask for, on rank 0."""
        config = self.config
        if config.timeline and config.timeline.lower() != "dynamic" and self.engine.rank == 0:
            # A later generation must not overwrite the timeline of an earlier one.
            later = f".{self.session.generation}" if config.worker >= 0 and self.session.generation > 1 else ""
            try:
                self.trace(config.timeline + later, config.timeline_mark_cycles)
            except OSError as error:  # in Horovod the job goes on, and jobs run whose folder for timelines is missing
                _log.error("HOROVOD_TIMELINE=%s: no timeline is written: %s", config.timeline, error)

    def stop_trace(self) -> None:
        timeline, self.timeline = self.timeline, None
        if timeline is not None:
            timeline.stop()

    def tune(self) -> None:
        """Starts tuning as the settings say."""
        config, engine = self.config, self.engine
        if not (config.autotune or config.tune_at_init) or engine.size == 1:
            return
        if not engine.tuning():
            if engine.rank == 0:
                _log.warning("the Python reference engine has nothing to tune")
            return
        from .tuning import at_init, live, search  # imported only when tuning is on

        hosts = self.session.hosts
        choices = search.choices(config, len(set(hosts)), names_of_set())
        if config.tune_at_init:
            at_init.tune(engine, config, hosts, choices, cache_directory(config))
        if config.autotune and engine.rank == 0:
            self.tuner = live.Tuner(engine, config, choices)

    def close(self, again: int = 0) -> None:
        """Leaves the job and frees everything; in a forked child it only closes copies. `again`: as for a session."""
        self.stop_trace()
        if self.tuner is not None:
            self.tuner.stop()
        try:
            # Dead peers, or a fork, must not stop this process from leaving.
            with contextlib.suppress(errors.HorovodInternalError):
                self.engine.leave(LEAVE_S)
        finally:  # also if a signal handler raised
            self.session.close(again)
            if self.cluster is not None:
                self.cluster.close()
            self.engine.close()
            self.groups.clear()
            self.handles.clear()
            self.repeats.clear()
