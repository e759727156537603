# Holds the one world of this process: opens it, closes it, and joins the next generation of an elastic job.
# Touches config, errors, groups, joining, membership, observe and world.
"""`runtime.world` is where the operations find the engine; basics.py has the functions that scripts call."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

from ..base import ending, errors, hints, tested, tracebacks
from ..base.config import Config, update_rank_variables, warn_of_ignored
from ..observe import stacks
from .groups import ProcessSet, expect_world, forget_world
from .joining import RANK_NUMBERS, connect
from .membership import Membership
from .observe import log
from .world import World

if TYPE_CHECKING:
    from ..clusters import ClusterRank


class Runtime:
    """Holds the world of this process, if there is one."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._world: World | None = None
        self._registered = False
        self._opened: tuple[Config, list[ProcessSet], ClusterRank | None] | None = None
        self._waiting: Config | None = None  # init() was called in a job that runs, and this rank has not joined it yet
        self._joined_at: float | None = None  # None: this process is a fork of the one that joined
        self._causes: tracebacks.Causes | None = None
        self.membership = Membership()
        self.notifications = self.membership.notifications

    @property
    def initialized(self) -> bool:
        return self._world is not None or self.waiting

    @property
    def waiting(self) -> bool:
        """Whether this rank is new in a job that runs, and has not joined it yet."""
        return self._waiting is not None

    @property
    def world(self) -> World:
        """The current world. A rank that waits joins it now; NotInitialized without a world."""
        return self._world or self._join_late()

    @property
    def config(self) -> Config:
        """The settings with this rank's numbers. Those of a rank that waits may change when it joins."""
        waiting = self._waiting
        return self.world.config if waiting is None else waiting

    @property
    def rank(self) -> int:
        """This process's number; as in `config`."""
        waiting = self._waiting
        return self.world.engine.rank if waiting is None else waiting.rank

    @property
    def size(self) -> int:
        """Number of processes in the job; as in `config`."""
        waiting = self._waiting
        return self.world.engine.size if waiting is None else waiting.size

    def open(self, config: Config, process_sets: list[ProcessSet], found: ClusterRank | None = None) -> None:
        """Joins the other ranks. A rank that is new in a job that runs would make them wait while the script builds its
        model and loads its data, so it joins later."""
        with self._lock:
            if self.initialized:
                return
            log.configure(config)
            if config.report_fd is not None and config.tracebacks == "short":
                tracebacks.install()
            stacks.offer(config.stacks_fd)  # before the others can wait for this rank
            self._opened = (config, process_sets, found)
            if config.newcomer:
                self._waiting = config
                expect_world(config.size, config.rank)
            else:
                self._begin()
            self.membership.opened(config)
            self.membership.active = self._world is not None
            if not self._registered:
                self._registered = True
                atexit.register(self.at_exit, config.report_fd, os.getpid())

    def _begin(self) -> World:
        assert self._opened is not None
        try:
            self._world = self._join(*self._opened, 0)
        except BaseException:
            self._opened = None
            raise
        hints.training.joined(functools.partial(self._world.engine.counter, "collectives"))
        if self._world.engine.rank == 0:  # one rank is enough
            warn_of_ignored()
            tested.warn_about_newer(tested.used())
        return self._world

    def stop_waiting(self) -> None:
        """If this rank waits, it joins the others now; blocks until they have taken it in."""
        with self._lock:
            if self._waiting is not None:
                self._join_late()

    def _join_late(self) -> World:
        with self._lock:
            if self._world is not None:  # another thread was here before
                return self._world
            if self._waiting is None:
                tracebacks.install_in_rank()
                raise errors.NotInitialized
            if self._opened is None:
                raise errors.HorovodInternalError(
                    f"this process was forked from rank {self._waiting.rank} before that rank joined its job; only "
                    "the parent process can communicate"
                )
            try:
                world = self._begin()
            except BaseException:
                forget_world()
                raise
            finally:
                self._waiting = None
            self.membership.active = True
            return world

    def close(self) -> None:
        with self._lock:
            if self._world is not None:
                self.membership.unguard()
                self.membership.active = False
                self._look_for_mistakes(self._world)
                self._report(self._world)
                self._world.close()
                self._world = None  # only now, so that an interrupted close can be repeated
            if self._waiting is not None:
                self._waiting = None
                forget_world()
            self._opened = None
            self.membership.closed()

    def _report(self, world: World) -> None:
        """Tells the launcher what its summary needs."""
        config = world.config
        if self._joined_at is None:
            return
        if config.report_fd is not None and ending.is_pipe(config.report_fd, config.report_pipe):
            waited = world.engine.counter("waited_ns") / 1e9
            ending.report_facts(config.report_fd, time.monotonic() - self._joined_at, waited)

    @staticmethod
    def _look_for_mistakes(world: World) -> None:
        engine = world.engine
        hints.training.left(engine.rank, engine.size, world.exchanged, world.config)

    def reset(self, commit: int = 0) -> None:
        """Leaves this generation and joins the next, in this process; blocks until it starts.

        `commit` is the number of this rank's last commit: rank 0 of the next generation has the largest one. Process
        sets that were given to init and are still a part of the world are registered again. Other sets, and a set that
        would contain all ranks, are removed; their process_set_id is None. Raises Removed when an elastic job has no
        slot for this process. In a job that is not elastic it is shutdown and init, and fails when a rank is lost.
        """
        with self._lock:
            if self._opened is None:
                raise errors.NotInitialized
            world, self._world = self._world, None
            self._waiting = None
            self.membership.active = False
            hints.training.unsure = True  # an interrupted step is no sign of a mistake
            if world is not None:
                self.membership.unguard()
                world.close(self.membership.how_to_leave())
            self.membership.check_may_join()
            self._world = self._join(*self._opened, commit)
            self.membership.active = True

    def _join(self, config: Config, process_sets: list[ProcessSet], found: ClusterRank | None, commit: int) -> World:
        while True:
            world: World | None = None
            try:
                self.membership.begin(config)
                world = connect(config, found, commit, self.membership)
                self.membership.guard(world.engine, config)
                world.groups.add([one for one in process_sets if config.worker < 0 or _fits(one, world.engine.size)])
                world.tune()
                world.begin_timeline()
                if world.session.numbers:
                    update_rank_variables(dict(zip(RANK_NUMBERS, world.session.numbers, strict=True)))
                self.membership.joined()
                self._joined_at = time.monotonic()
                if config.private_directory is not None:
                    self._causes = tracebacks.Causes(config.private_directory, world.session.generation)
                    self._causes.watch()
                return world
            except BaseException as error:
                again = config.worker >= 0 and isinstance(error, errors.HorovodInternalError)
                if world is not None:
                    self.membership.unguard()
                    world.close(int(again))
                # Another rank was lost during the join. The elastic driver starts another generation.
                if not again or getattr(error, "final", False):
                    raise

    def at_exit(self, report_fd: int | None, pid: int) -> None:
        # First, because leaving makes other ranks fail, and by then the launcher must know the root cause.
        if report_fd is not None and os.getpid() == pid:
            error = getattr(sys, "last_value", None)
            ending.report(report_fd, tracebacks.user_line(error) if isinstance(error, BaseException) else "")
            if self._causes is not None and self._world is not None:
                self._causes.note(self._world.engine.rank)
        self.close()

    def after_fork(self) -> None:
        # Another thread may have been in init or shutdown during the fork.
        self._lock = threading.RLock()
        self._joined_at = None
        if self._waiting is not None:
            self._opened = None
        self.membership.after_fork()


def _fits(process_set: ProcessSet, size: int) -> bool:
    ranks = process_set.ranks or []
    return len(ranks) < size and max(ranks, default=0) < size


runtime = Runtime()
hints.training.watch_exit()
os.register_at_fork(after_in_child=runtime.after_fork)
