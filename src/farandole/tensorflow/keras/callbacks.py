# The callbacks of tf.keras: Keras 3, or tf_keras where TF_USE_LEGACY_KERAS asks for it.
# Touches tf.keras and farandole.keras.bodies.
"""Stands where a script has `horovod.tensorflow.keras.callbacks`."""

from __future__ import annotations

from typing import Any

from ...keras import bodies
from ...runtime import rank
from ..framework import tf

_Callback: Any = tf.keras.callbacks.Callback
_Checkpoint: Any = tf.keras.callbacks.ModelCheckpoint


class BroadcastGlobalVariablesCallback(bodies.Broadcast, _Callback):  # type: ignore[misc]
    """Gives all ranks the root's variables when training begins."""


class MetricAverageCallback(bodies.MetricAverage, _Callback):  # type: ignore[misc]
    """Replaces the metrics of an epoch by their average over the ranks."""


class LearningRateScheduleCallback(bodies.Schedule, _Callback):  # type: ignore[misc]
    """Sets the learning rate to `initial_lr` times a multiplier of the epoch."""


class LearningRateWarmupCallback(bodies.Warmup, _Callback):  # type: ignore[misc]
    """Raises the learning rate from that of one process to that of the job, batch by batch."""


class BestModelCheckpoint(_Checkpoint):  # type: ignore[misc]
    """Saves the best model so far, on rank 0 alone. Set `filepath` before training: the default is best.keras."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
        filepath: str = "",
    ) -> None:
        super().__init__(
            filepath or ("best.weights.h5" if save_weights_only else "best.keras"),
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Where it saves, if it does so in the middle of an epoch."""
        if rank() == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Where it saves at the end of one."""
        if rank() == 0:
            super().on_epoch_end(epoch, logs)
