# Copies parameters from one rank to all, also those that MXNet initializes later.
# Touches MXNet, autoload, bindings.private, operations.objects, framework and ops.
"""Scripts call these once before training, so that all ranks begin with the same parameters."""

from __future__ import annotations

from typing import Any

from ..autoload import patching_allowed
from ..bindings.private.mxnet_names import after_first_values
from ..operations.objects import allgather_object, broadcast_object
from .framework import mx
from .ops import broadcast_

__all__ = ["allgather_object", "broadcast_object", "broadcast_parameters"]


def broadcast_parameters(params: Any, root_rank: int = 0, prefix: str | None = None) -> None:
    """Copies the root's values to every rank, in place.

    `params`: `block.collect_params()`, or a dict of arrays, such as the two that `Module.get_params()` gives. A
    parameter whose shape is not known yet is broadcast when MXNet initializes it, in the first forward pass. `prefix`
    is put before the names of the broadcasts. If you call this for several models whose parameters have equal names,
    give each call another prefix.
    """
    if not hasattr(params, "items"):
        raise ValueError(
            f"params is a {type(params).__name__}; expected block.collect_params(), or a dict of names and arrays"
        )
    for key, value in sorted(params.items()):
        name = f"parameter.{prefix or ''}{key}"
        if isinstance(value, mx.gluon.Parameter):
            try:
                value = value.data()
            except mx.gluon.parameter.DeferredInitializationError:
                _broadcast_later(value, root_rank, name)
                continue
        if not isinstance(value, mx.nd.NDArray):
            raise ValueError(f"params: {key!r} is a {type(value).__name__}, not an array; see broadcast_object")
        broadcast_(value, root_rank, name)


def _broadcast_later(param: Any, root_rank: int, name: str) -> None:
    """Broadcasts once, directly after MXNet has given the parameter its first values."""
    if not patching_allowed():
        raise RuntimeError(
            f"{name}: its shape is not known yet, and FARANDOLE_AUTOLOAD=0 forbids patching MXNet, so farandole cannot "
            "see when the parameter is initialized. Call broadcast_parameters after the first forward pass"
        )
    after_first_values(param, lambda param: broadcast_(param.data(), root_rank, name))
