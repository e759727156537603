# Every private name of MXNet that this package uses, with what it is for and what happens without it.
# Touches MXNet and objects of its that it is given.
"""MXNet 1.9.1 is the last release and has all of them; `farandole.mxnet` supports no other."""

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
        raise ImportError("farandole.mxnet does not support this MXNet: it has no mxnet.base._LIB")
    return _library


def after_first_values(param: Any, call: Callable[[Any], None]) -> None:
    """Calls `call(param)` once, after MXNet has given it its first values. Raises RuntimeError if this is impossible.

    Until then, the method of this one object is replaced.
    """
    initialize = of(type(param), "_init_impl", *_INITIALIZE)
    if initialize is None:
        raise RuntimeError("this MXNet does not report when a parameter gets its first values")

    def and_call(self: Any, *args: Any, **kwargs: Any) -> None:
        del self._init_impl
        initialize(self, *args, **kwargs)
        call(self)

    param._init_impl = types.MethodType(and_call, param)


def begin_trainer(trainer: Any, rescale: float) -> None:
    """Scales the trainer's gradients. Raises RuntimeError if this MXNet would not let it reduce them."""
    if _reduces is None or not has(trainer, "_scale", *_TRAINER) or not has(trainer, "_params", *_TRAINER):
        raise RuntimeError("DistributedTrainer does not support this MXNet: gradients would not be averaged")
    trainer._scale *= rescale


def params_of(trainer: Any) -> list[Any]:
    """The trainer's parameters, in its order."""
    return list(trainer._params)


def fill(array: Any, values: Any, like: Callable[[Any], Any]) -> None:
    """Copies NumPy's values to an array of MXNet; `like` makes a second array if this is necessary."""
    if has(array, "_sync_copyfrom", *_FILL):
        array._sync_copyfrom(values)
    else:
        array[:] = like(values)
