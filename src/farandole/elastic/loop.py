# The loop around an elastic training function: syncs the state, restores it after a loss, runs the function again.
# Touches the rooms base and world; the file state.
"""`run(func)` is the decorator; `run_fn(func, reset)` is the same with another way to join the other ranks again."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from ..base.errors import HorovodInternalError, HostsUpdatedInterrupt, Mismatch, NotInitialized, PeerLost, Revoked
from ..world.runtime import runtime
from .state import State, agree_on_largest

logger = logging.getLogger("farandole")


class WorkerNotificationManager:
    """Horovod's class for news about hosts. Ranks get them from the elastic driver; programs may send more here."""

    def __init__(self) -> None:
        self._listeners: list[Any] = []

    def init(self, *_: Any, **__: Any) -> None:
        """Does nothing: ranks get the news from the elastic driver."""

    def register_listener(self, listener: Any) -> None:
        """From now on `listener.on_hosts_updated(timestamp, result)` is called for each update."""
        self._listeners.append(listener)

    def remove_listener(self, listener: Any) -> None:
        """The listener is not called any more."""
        self._listeners.remove(listener)

    def handle_hosts_updated(self, timestamp: int, update_res: int) -> None:
        """Calls all listeners."""
        for listener in list(self._listeners):
            listener.on_hosts_updated(timestamp, update_res)


notification_manager = WorkerNotificationManager()


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates `func(state, ...)`: the function is called again when ranks were lost or joined.

    A rank that is new in a job that runs is taken in here, and gets its number. All ranks start with the state of
    rank 0. After a loss the state is restored from the last commit; after
    HostsUpdatedInterrupt it is not changed. In a job that is not elastic a lost rank ends the job. Mismatch is raised,
    because the program would make the same mistake again.
    """
    return run_fn(func, None)


def run_fn(func: Callable[..., Any], reset: Callable[[], Any] | None) -> Callable[..., Any]:
    """Like `run`, but calls `reset()` to join the other ranks again."""

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        notification_manager.init()
        notification_manager.register_listener(state)
        try:
            return _repeat(func, reset, state, args, kwargs)
        finally:
            notification_manager.remove_listener(state)

    return wrapper


def _repeat(
    func: Callable[..., Any], reset: Callable[[], Any] | None, state: State, args: tuple[Any, ...], kwargs: Any
) -> Any:
    skip_sync, changed = False, False
    runtime.stop_waiting()
    while True:
        try:
            if changed:
                state.on_reset()
            # New ranks need the state, even if the ranks that stayed do not need to sync.
            known = agree_on_largest([not skip_sync, state._commits if _is_source() else 0], "elastic.sync")
            if known[0]:
                state.sync()
                state._take_number(known[1])
            return func(state, *args, **kwargs)
        except HorovodInternalError as error:
            if _final(error):
                raise
            logger.warning("%s; returning to commit %d", error, state._commits)
            state.restore()
            skip_sync = False
        except HostsUpdatedInterrupt as interrupt:
            skip_sync = interrupt.skip_sync
        if reset is None:
            runtime.reset(state._commits)
        else:
            reset()
        changed = True


def _is_source() -> bool:
    """Whether this rank sends its state to the others."""
    return not runtime.initialized or runtime.world.engine.rank == 0


def _final(error: HorovodInternalError) -> bool:
    """Whether another attempt would not help: the program is wrong, or a rank is lost and the job is not elastic."""
    if isinstance(error, Mismatch):
        return True
    if not isinstance(error, (PeerLost, Revoked)):
        return False  # the program itself raised it on some ranks, which then meet again
    try:
        world = runtime.world
    except NotInitialized:
        return False
    return world.engine.size > 1 and not world.config.elastic
