# Elastic training for tf.keras: the model and its optimizer as state, and callbacks that commit.
# Touches tf.keras, farandole.keras.elastic_bodies and the elastic loop of TensorFlow.
"""Replaces `horovod.tensorflow.keras.elastic` in scripts."""

from __future__ import annotations

from typing import Any

from ...keras import elastic_bodies
from ..elastic import run
from ..framework import tf

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]

_Callback: Any = tf.keras.callbacks.Callback

KerasState = elastic_bodies.KerasState


class CommitStateCallback(elastic_bodies.Commit, _Callback):  # type: ignore[misc]
    """Commits the state after every `batches_per_commit` batches and at the end of each epoch."""


class UpdateBatchStateCallback(elastic_bodies.UpdateBatch, _Callback):  # type: ignore[misc]
    """Keeps `state.batch` up to date. Keras itself restarts an interrupted epoch from its beginning."""


class UpdateEpochStateCallback(elastic_bodies.UpdateEpoch, _Callback):  # type: ignore[misc]
    """Keeps `state.epoch` up to date."""
