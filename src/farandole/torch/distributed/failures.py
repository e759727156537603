# Errors in the form that torch.distributed expects: DistBackendError, with the missing ranks after a timeout.
# Touches torch and errors.
"""Every failure of a collective is a DistBackendError; bad arguments stay ValueError, TypeError or RuntimeError."""

from __future__ import annotations

import time
from typing import Any

from torch import distributed as dist

from ...base import errors

GRACE_SECONDS = 1.0  # ranks that wait for the same operation time out at about the same time


def translated(what: str, failure: Exception) -> Any:
    """The failure as the error that callers of torch.distributed expect."""
    if isinstance(failure, dist.DistBackendError):
        return failure
    return dist.DistBackendError(f"{what}: {failure}")


def timeout_error(group: Any, what: str, error: errors.FarandoleTimeout) -> Any:
    """The error after a timeout, with the missing ranks: each rank that times out writes a key and reads those of
    others.
    """
    text = f"{what} did not finish within {error.seconds:g} s"
    try:
        missing = _missing(group, what)
    except Exception as problem:  # the store may have ended together with the missing rank
        return dist.DistBackendError(f"{text} (the store does not answer: {problem})")
    if missing:
        text += f"; ranks that did not call it: {', '.join(map(str, missing))}"
    return dist.DistBackendError(text)


def _missing(group: Any, what: str) -> list[int]:
    keys = {rank: f"late/{what}/{rank}" for rank in group.ranks}
    group.store.set(keys[group.world.engine.rank], b"1")
    until = time.monotonic() + GRACE_SECONDS
    while True:
        missing = [rank for rank, key in keys.items() if not group.store.check([key])]
        if not missing or time.monotonic() > until:
            return missing
        time.sleep(0.05)
