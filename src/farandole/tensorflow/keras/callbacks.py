# The callbacks of tf.keras: for Keras 3, or for tf_keras if TF_USE_LEGACY_KERAS is set.
# Touches tf.keras and farandole.keras.bodies.
"""Replaces `horovod.tensorflow.keras.callbacks` in scripts."""

from __future__ import annotations

from typing import Any

from ...keras import bodies
from ..framework import tf

_Callback: Any = tf.keras.callbacks.Callback
_Checkpoint: Any = tf.keras.callbacks.ModelCheckpoint


class BroadcastGlobalVariablesCallback(bodies.Broadcast, _Callback):  # type: ignore[misc]
    """Copies the root's variables to all ranks when training begins."""


class MetricAverageCallback(bodies.MetricAverage, _Callback):  # type: ignore[misc]
    """Replaces the metrics of an epoch by their average over the ranks."""


class LearningRateScheduleCallback(bodies.Schedule, _Callback):  # type: ignore[misc]
    """Sets the learning rate to `initial_lr` times a multiplier of the epoch."""


class LearningRateWarmupCallback(bodies.Warmup, _Callback):  # type: ignore[misc]
    """Raises the learning rate in each batch, from the rate of one process to the rate of the job."""


class BestModelCheckpoint(bodies.SavesOnRoot, _Checkpoint):  # type: ignore[misc]
    """Saves the best model so far, on rank 0 only. Set `filepath` before training: the default is best.keras."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
        filepath: str = "",
    ) -> None:
        filepath = filepath or ("best.weights.h5" if save_weights_only else "best.keras")
        super().__init__(
            filepath, monitor=monitor, verbose=verbose, save_best_only=True, save_weights_only=save_weights_only,
            mode=mode, save_freq=save_freq,
        )  # fmt: skip
