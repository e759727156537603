# Elastic training for Keras 3: the model and its optimizer as state, and callbacks that commit.
# Touches Keras, elastic, framework and values.
"""Stands where a script has `horovod.keras.elastic`."""

from __future__ import annotations

import importlib
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
    """Decorates `func(state, ...)`: it is called again, with the last commit, when ranks were lost or came.

    On TensorFlow and JAX errors from inside compiled steps count as well.
    """
    backend = keras.backend.backend()
    if backend not in ("tensorflow", "jax"):
        return loop.run(func)
    repeated: Callable[..., Any] = importlib.import_module(f"farandole.{backend}.elastic").run(func)
    return repeated


class CommitStateCallback(elastic_bodies.Commit, _Callback):  # type: ignore[misc]
    """Commits the state every so many batches."""


class UpdateBatchStateCallback(elastic_bodies.UpdateBatch, _Callback):  # type: ignore[misc]
    """Keeps `state.batch` up to date; Keras itself begins an interrupted epoch anew."""


class UpdateEpochStateCallback(elastic_bodies.UpdateEpoch, _Callback):  # type: ignore[misc]
    """Keeps `state.epoch` up to date."""
