# Elastic training for Keras 3: the model and its optimizer as state, and callbacks that commit.
# Touches Keras; the rooms elastic, jax and tensorflow; the files elastic_bodies and framework.
"""Replaces `horovod.keras.elastic` in scripts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..elastic import loop
from . import elastic_bodies
from .framework import require

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]

keras: Any = require()
_Callback: Any = keras.callbacks.Callback

KerasState = elastic_bodies.KerasState


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates `func(state, ...)`: calls it again with the last commit when ranks were lost or added.

    On TensorFlow and JAX this includes errors from inside compiled steps.
    """
    backend = keras.backend.backend()
    if backend == "tensorflow":
        from ..tensorflow.elastic import run as repeat
    elif backend == "jax":
        from ..jax.elastic import run as repeat
    else:
        repeat = loop.run
    return repeat(func)


class CommitStateCallback(elastic_bodies.Commit, _Callback):  # type: ignore[misc]
    """Commits the state after every `batches_per_commit` batches and at the end of each epoch."""


class UpdateBatchStateCallback(elastic_bodies.UpdateBatch, _Callback):  # type: ignore[misc]
    """Keeps `state.batch` up to date. Keras itself restarts an interrupted epoch from its beginning."""


class UpdateEpochStateCallback(elastic_bodies.UpdateEpoch, _Callback):  # type: ignore[misc]
    """Keeps `state.epoch` up to date."""
