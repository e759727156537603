# Elastic training: state that is committed, a loop that goes on when ranks come and go, and the launcher's side of it.
# Re-exports alone, each when it is asked for: the launcher needs no arrays.
"""`run`, `State`, `ObjectState` and their companions; frameworks have their own in `farandole.torch.elastic`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..errors import HorovodInternalError, HostsUpdatedInterrupt
    from .loop import notification_manager, run, run_fn
    from .mirror import LostShards, RandomState, Sharded
    from .state import HostUpdateResult, ObjectState, State

__all__ = [
    "HorovodInternalError",
    "HostUpdateResult",
    "HostsUpdatedInterrupt",
    "LostShards",
    "ObjectState",
    "RandomState",
    "Sharded",
    "State",
    "notification_manager",
    "run",
    "run_fn",
]

_HOMES = {
    "farandole.errors": "HorovodInternalError HostsUpdatedInterrupt",
    "farandole.elastic.loop": "notification_manager run run_fn",
    "farandole.elastic.mirror": "LostShards RandomState Sharded",
    "farandole.elastic.state": "HostUpdateResult ObjectState State",
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
