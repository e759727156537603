# Base classes of other programs' callbacks: horovod._keras.callbacks.
# Touches bodies.
"""The classes of bodies.py, with Keras's backend as the first argument."""

from __future__ import annotations

from typing import Any

from .. import bodies


class BroadcastGlobalVariablesCallbackImpl(bodies.Broadcast):
    """Copies the root's variables to all ranks once, after the first batch."""

    def __init__(self, backend: Any, root_rank: int, device: str = "", *args: Any) -> None:
        super().__init__(root_rank, device)
        self.backend = backend


class MetricAverageCallbackImpl(bodies.MetricAverage):
    """Replaces the metrics of an epoch by their average over the ranks."""

    def __init__(self, backend: Any, device: str = "", *args: Any) -> None:
        super().__init__(device)
        self.backend = backend


class LearningRateScheduleCallbackImpl(bodies.Schedule):
    """Sets the learning rate to `initial_lr` times a multiplier of the epoch."""

    def __init__(
        self, backend: Any, initial_lr: float, multiplier: Any, start_epoch: int = 0, end_epoch: int | None = None,
        staircase: bool = True, momentum_correction: bool = True, steps_per_epoch: int | None = None, *args: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            initial_lr, multiplier, start_epoch, end_epoch, staircase, momentum_correction, steps_per_epoch
        )
        self.backend = backend


class LearningRateWarmupCallbackImpl(bodies.Warmup):
    """Raises the learning rate in each batch, from the rate of one process to the rate of the job."""

    def __init__(
        self, backend: Any, initial_lr: float, warmup_epochs: int = 5, momentum_correction: bool = True,
        steps_per_epoch: int | None = None, verbose: int = 0, *args: Any,
    ) -> None:  # fmt: skip
        super().__init__(initial_lr, warmup_epochs, momentum_correction, steps_per_epoch, verbose)
        self.backend = backend
