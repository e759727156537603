# Elastic training for Keras 3: the model and its optimizer as state, and callbacks that commit.
# Touches Keras, elastic, framework and values.
"""Stands where a script has `horovod.keras.elastic`."""

from __future__ import annotations

from typing import Any

from ..elastic.loop import run
from . import elastic_bodies
from .framework import require

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]

keras: Any = require()
_Callback: Any = keras.callbacks.Callback

KerasState = elastic_bodies.KerasState


class CommitStateCallback(elastic_bodies.Commit, _Callback):  # type: ignore[misc]
    """Commits the state every so many batches."""


class UpdateBatchStateCallback(elastic_bodies.UpdateBatch, _Callback):  # type: ignore[misc]
    """Keeps `state.batch` up to date; Keras itself begins an interrupted epoch anew."""


class UpdateEpochStateCallback(elastic_bodies.UpdateEpoch, _Callback):  # type: ignore[misc]
    """Keeps `state.epoch` up to date."""
