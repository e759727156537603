# Sends values from workers to the callbacks of `run`.
# Touches the queue that the executor gave.
"""A train function calls `log(info)`; `run(..., callbacks=[...])` calls each callback with the values of rank 0."""

from __future__ import annotations

from typing import Any

_queue: Any = None


def configure(queue: Any) -> None:
    """Sets the queue of `log`; None: `log` does nothing."""
    global _queue
    _queue = queue


def log(info_dict: dict[str, Any]) -> None:
    """Sends a value to the callbacks. Only rank 0 sends, and only if there are callbacks."""
    from farandole.world import basics

    if _queue is not None and not (basics.is_initialized() and basics.rank() != 0):
        _queue.put(info_dict)
