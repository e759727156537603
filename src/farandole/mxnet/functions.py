# Parameters from one rank to all, those that MXNet has not initialized yet among them; leaving in good order.
# Touches MXNet, ops and runtime; objects come from the NumPy layer.
"""Called once before training, so that all ranks begin with the same parameters."""

from __future__ import annotations

from typing import Any

from ..autoload import allowed
from ..objects import allgather_object, broadcast_object
from ..private.mxnet_names import after_first_values
from .framework import mx
from .ops import broadcast_

__all__ = ["allgather_object", "broadcast_object", "broadcast_parameters"]


def broadcast_parameters(params: Any, root_rank: int = 0, prefix: str | None = None) -> None:
    """Gives every rank the root's values, in place.

    `params`: `block.collect_params()`, or a dict of arrays, as `Module.get_params()` gives two of. A parameter whose
    shape is not known yet is broadcast when MXNet initializes it, at the first forward pass. `prefix` keeps the names
    of several calls apart, which matters when parameters of equal names are initialized later.
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
    """Once, right after MXNet has given the parameter its first values."""
    if not allowed():
        raise RuntimeError(
            f"{name}: its shape is not known yet, and FARANDOLE_AUTOLOAD=0 lets nothing of MXNet be replaced to see "
            "when it is: call broadcast_parameters after the first forward pass"
        )
    after_first_values(param, lambda param: broadcast_(param.data(), root_rank, name))
