# The errors that users of a binding catch, under the binding's own name.
# Only re-exports names of errors.
"""A binding imports all of them and lists them in its `__all__`."""

from __future__ import annotations

from ..base.errors import (
    FarandoleTimeout,
    HorovodInternalError,
    Mismatch,
    NotInitialized,
    PeerLost,
    Revoked,
    ShutDown,
)

__all__ = [
    "FarandoleTimeout",
    "HorovodInternalError",
    "Mismatch",
    "NotInitialized",
    "PeerLost",
    "Revoked",
    "ShutDown",
]
