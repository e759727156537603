# The loop around an elastic training function: begins with equal state, goes back after a loss, goes on after a change.
# Touches errors, runtime and state.
"""`run(func)` is the decorator; `run_fn(func, reset)` is the same with another way to meet the others again."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from ..errors import HorovodInternalError, HostsUpdatedInterrupt, Mismatch, NotInitialized
from ..runtime import runtime
from .state import State, agree_on_largest

logger = logging.getLogger("farandole")


class WorkerNotificationManager:
    """Horovod's place to hear of hosts. Ranks hear from the coordinator anyway; this is for those who tell more."""

    def __init__(self) -> None:
        self._listeners: list[Any] = []

    def init(self, *_: Any, **__: Any) -> None:
        """Nothing is left to do: ranks hear from the coordinator."""

    def register_listener(self, listener: Any) -> None:
        """`listener.on_hosts_updated(timestamp, result)` is called from now on."""
        self._listeners.append(listener)

    def remove_listener(self, listener: Any) -> None:
        """The listener hears no more."""
        self._listeners.remove(listener)

    def handle_hosts_updated(self, timestamp: int, update_res: int) -> None:
        """Tells all listeners."""
        for listener in list(self._listeners):
            listener.on_hosts_updated(timestamp, update_res)


notification_manager = WorkerNotificationManager()


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates `func(state, ...)`: it is called again, with the last commit, when ranks were lost or came.

    Ranks begin with rank 0's state. After a loss the state goes back to the last commit; after HostsUpdatedInterrupt it
    stays as it is. In a job whose ranks are fixed a lost rank ends the job.
    """
    return run_fn(func, None)


def run_fn(func: Callable[..., Any], reset: Callable[[], Any] | None) -> Callable[..., Any]:
    """As `run`, with `reset()` instead of the usual way to meet the other ranks again."""

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
    mismatched_at = -1
    while True:
        try:
            if changed:
                state.on_reset()
            # One that came meanwhile needs the state even where those who were there before could do without.
            known = agree_on_largest([not skip_sync, state.commits if _is_source() else 0], "elastic.sync")
            if known[0]:
                state.sync()
                state.take_number(known[1])
            return func(state, *args, **kwargs)
        except HorovodInternalError as error:
            if _final(error) or (isinstance(error, Mismatch) and mismatched_at == state.commits):
                raise  # the ranks would disagree in the same way for ever
            mismatched_at = state.commits if isinstance(error, Mismatch) else -1
            logger.warning("%s; going back to commit %d", error, state.commits)
            state.restore()
            skip_sync = False
        except HostsUpdatedInterrupt as interrupt:
            skip_sync = interrupt.skip_sync
        if reset is None:
            runtime.reset(state.commits)
        else:
            reset()
        changed = True


def _is_source() -> bool:
    """Whether this rank gives its state to the others."""
    return not runtime.initialized or runtime.world.engine.rank == 0


def _final(error: HorovodInternalError) -> bool:
    """Whether the ranks are fixed, so that a rank that is lost stays lost."""
    try:
        world = runtime.world
    except NotInitialized:
        return False
    return world.engine.size > 1 and not world.config.elastic and not isinstance(error, Mismatch)
