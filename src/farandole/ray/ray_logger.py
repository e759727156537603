# What workers tell the callbacks of `run`.
# Touches the queue that the executor gave.
"""`log(info)` in a train function; `run(..., callbacks=[...])` calls each callback with what rank 0 has logged."""

from __future__ import annotations

from typing import Any

_queue: Any = None


def configure(queue: Any) -> None:
    """Where `log` puts things from now on; None: nowhere."""
    global _queue
    _queue = queue


def log(info_dict: dict[str, Any]) -> None:
    """For the callbacks; does nothing on other ranks than 0, or without callbacks."""
    from farandole import runtime

    if _queue is not None and not (runtime.is_initialized() and runtime.rank() != 0):
        _queue.put(info_dict)
