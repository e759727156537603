# Elastic training: state that is committed, and a loop that continues when ranks join or leave.
# Only re-exports names, and imports each at its first use, because the launcher needs no arrays.
"""`run`, `State`, `ObjectState` and related names. Frameworks have their own, such as `farandole.torch.elastic`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..base.named import module_of

if TYPE_CHECKING:
    from ..base.errors import HorovodInternalError, HostsUpdatedInterrupt
    from .loop import WorkerNotificationManager, notification_manager, run, run_fn
    from .mirror import LostShards, RandomState, Sharded
    from .state import (
        HostUpdateResult,
        ObjectState,
        State,
        commits,
        describe_memory,
        load_from,
        memory,
        save_to,
    )

__all__ = [
    "HorovodInternalError",
    "HostUpdateResult",
    "HostsUpdatedInterrupt",
    "LostShards",
    "ObjectState",
    "RandomState",
    "Sharded",
    "State",
    "WorkerNotificationManager",
    "commits",
    "describe_memory",
    "load_from",
    "memory",
    "notification_manager",
    "run",
    "run_fn",
    "save_to",
]

_HOMES = {
    "farandole.base.errors": "HorovodInternalError HostsUpdatedInterrupt",
    "farandole.elastic.loop": "WorkerNotificationManager notification_manager run run_fn",
    "farandole.elastic.mirror": "LostShards RandomState Sharded",
    "farandole.elastic.state": "HostUpdateResult ObjectState State commits describe_memory load_from memory save_to",
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(module_of(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
