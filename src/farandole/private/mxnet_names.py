# Every private name of MXNet that this package uses, with what it is for and what happens without it.
# Touches MXNet and objects of its that it is given.
"""MXNet 1.9.1 is its last release, and has them all; `farandole.mxnet` takes no other."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from . import find, has, of

_PLACES = ("asking where an array lies, by MXNet's C interface", "`import farandole.mxnet` raises ImportError")
_INITIALIZE = (
    "broadcasting parameters whose shape is not known yet",
    "broadcast_parameters raises RuntimeError for them: call it after the first forward pass",
)
_FILL = ("filling a new array from NumPy's memory", "it goes through a second array")

_TRAINER = ("DistributedTrainer", "it cannot be made: RuntimeError")

_library = find("mxnet.base:_LIB", *_PLACES)  # the functions of c_api.h
find("mxnet.gluon.parameter:Parameter._init_impl", *_INITIALIZE)
find("mxnet.ndarray.ndarray:NDArray._sync_copyfrom", *_FILL)
_reduces = find("mxnet.gluon:Trainer._allreduce_grads", *_TRAINER)


def library() -> Any:
    """The functions of MXNet's c_api.h; ImportError without them."""
    if _library is None:
        raise ImportError("farandole.mxnet does not know this MXNet: there is no mxnet.base._LIB")
    return _library


def after_first_values(param: Any, call: Callable[[Any], None]) -> None:
    """`call(param)`, once, right after MXNet has given it its first values; RuntimeError where that cannot be.

    The method of this one object is replaced until then.
    """
    initialize = of(type(param), "_init_impl", *_INITIALIZE)
    if initialize is None:
        raise RuntimeError("this MXNet does not tell when a parameter gets its first values")

    def and_call(self: Any, *args: Any, **kwargs: Any) -> None:
        del self._init_impl
        initialize(self, *args, **kwargs)
        call(self)

    param._init_impl = types.MethodType(and_call, param)


def begin_trainer(trainer: Any, rescale: float) -> None:
    """Scales its gradients; RuntimeError where this MXNet would not ask it to reduce them."""
    if _reduces is None or not has(trainer, "_scale", *_TRAINER) or not has(trainer, "_params", *_TRAINER):
        raise RuntimeError("DistributedTrainer does not know this MXNet, which would train each rank by itself")
    trainer._scale *= rescale


def params_of(trainer: Any) -> list[Any]:
    """Its parameters, in its order."""
    return list(trainer._params)


def fill(array: Any, values: Any, like: Callable[[Any], Any]) -> None:
    """NumPy's values into an array of MXNet's; `like` makes one of them where that must be."""
    if has(array, "_sync_copyfrom", *_FILL):
        array._sync_copyfrom(values)
    else:
        array[:] = like(values)
