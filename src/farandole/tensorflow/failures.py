# Errors of the engine that happened inside a graph: TensorFlow turns them into its own, and here they are turned back.
# Touches TensorFlow and errors.
"""`translated(error)` gives what eager mode would have raised."""

from __future__ import annotations

import re

from .. import errors
from .framework import tf

_KINDS = (
    errors.PeerLost,
    errors.Revoked,
    errors.ShutDown,
    errors.Mismatch,
    errors.FarandoleTimeout,
    errors.NotInitialized,
    errors.HorovodInternalError,
    ValueError,
    TypeError,
)
_BY_NAME: dict[str, type[Exception]] = {kind.__name__: kind for kind in _KINDS}
_WORDS = re.compile(rf"(?:^|[\s.])({'|'.join(_BY_NAME)}): (.*)$", re.MULTILINE)


def translated(error: Exception) -> Exception | None:
    """What an operation of ours raised inside the graph; None when the error comes from something else."""
    if not isinstance(error, tf.errors.OpError):
        return None
    found = _WORDS.search(str(error.message))
    if found is None:
        return None
    kind, words = _BY_NAME[found[1]], found[2]
    if kind is errors.NotInitialized:
        return errors.NotInitialized()
    return kind(words)
