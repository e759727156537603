# The code of the callbacks without their base class: the same for Keras 3 and tf_keras.
# Touches the rooms operations and world; the files framework and values. Imports no Keras.
"""`callbacks.py` combines each class with the `Callback` of its Keras.

The hooks have the names of Horovod's callbacks (`on_batch_end`, which `on_train_batch_end` calls), because subclasses
in other code override these.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ..operations import ops
from ..operations.reductions import Average
from ..world.basics import rank, size
from .framework import array_of, assign, sync_variables_from_jax, variables_of
from .values import broadcast_variables

_log = logging.getLogger("farandole")


def _on_tensorflow() -> bool:
    keras = sys.modules.get("keras")
    return keras is None or keras.backend.backend() == "tensorflow"


class Broadcast:
    """Copies the root's variables to all ranks once, after the first batch, when the optimizer's variables exist."""

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        self._local = {id(variable) for variable in local_variables or ()}

    def register_local_var(self, var: Any) -> None:
        """This variable keeps its own value on each rank."""
        self._local.add(id(var))

    def set_model(self, model: Any) -> None:
        """Runs before Keras compiles the step. XLA cannot compile calls to other ranks, so the step stays a plain
        graph.
        """
        base: Any = super()
        base.set_model(model)
        if getattr(model, "jit_compile", None) is True and _on_tensorflow():
            _log.warning("jit_compile=True is switched off: XLA cannot compile a step that talks to other ranks")
            model.jit_compile = False

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.broadcast_done:
            return
        model: Any = self.model  # type: ignore[attr-defined]
        variables = variables_of(model, model.optimizer)
        broadcast_variables([one for one in variables if id(one) not in self._local], self.root_rank)
        self.broadcast_done = True


class MetricAverage:
    """Replaces the metrics of an epoch by their average over the ranks. Put it before callbacks that use them."""

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        names = sorted(name for name, value in (logs or {}).items() if np.ndim(value) == 0)
        handles = [
            ops.allreduce_async(np.array(float(array_of(logs[name]))), op=Average, name=f"metric.{name}")
            for name in names
        ]
        for name, handle in zip(names, handles, strict=True):
            logs[name] = float(ops.synchronize(handle))


class Schedule:
    """Sets the learning rate to `initial_lr` times a multiplier of the epoch; unless `staircase`, at each batch."""

    def __init__(
        self,
        initial_lr: float,
        multiplier: Any,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr is needed: the learning rate that the multiplier is applied to")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch: int | None = None
        self._momentum: float | None = None
        if callable(multiplier):
            self.multiplier: Callable[[float], float] = multiplier
        else:
            self.staircase = True
            self.multiplier = lambda epoch: multiplier ** (epoch - self.start_epoch)

    def _active(self) -> bool:
        epoch = self.current_epoch or 0
        return epoch >= self.start_epoch and (self.end_epoch is None or epoch < self.end_epoch)

    def _set(self, epoch: float) -> None:
        sync_variables_from_jax(self.model)  # type: ignore[attr-defined]
        optimizer: Any = self.model.optimizer  # type: ignore[attr-defined]
        old, new = float(array_of(optimizer.learning_rate)), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = new
        momentum: Any = getattr(optimizer, "momentum", None)
        # Momentum has steps of the old rate. If it is a constant of the compiled step, it cannot be corrected.
        if self.momentum_correction and hasattr(momentum, "assign") and old > 0:
            self._momentum = float(array_of(momentum))
            assign(momentum, self._momentum * new / old)

    def on_train_begin(self, logs: Any = None) -> None:
        params: Any = self.params or {}  # type: ignore[attr-defined]
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = params.get("steps")
            if not self.steps_per_epoch and params.get("samples") and params.get("batch_size"):
                self.steps_per_epoch = params["samples"] // params["batch_size"]  # Keras of TensorFlow 1 says these
            if not self.steps_per_epoch:
                raise ValueError("the number of batches per epoch is not known: pass steps_per_epoch to the callback")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        if not self._active():
            return
        if self.staircase:
            if batch == 0:
                self._set(self.current_epoch or 0)
        else:
            self._set((self.current_epoch or 0) + batch / float(self.steps_per_epoch or 1))

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._momentum is not None:
            sync_variables_from_jax(self.model)  # type: ignore[attr-defined]
            assign(self.model.optimizer.momentum, self._momentum)  # type: ignore[attr-defined]
            self._momentum = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            optimizer: Any = self.model.optimizer  # type: ignore[attr-defined]
            logs["lr"] = float(array_of(optimizer.learning_rate))


class Warmup(Schedule):
    """Raises the learning rate in each batch, from the rate of one process to the rate of the job."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        self.verbose = verbose
        self.warmup_epochs = warmup_epochs

        def multiplier(epoch: float) -> float:
            # Uses the end of the batch, so that the last batch of the warm-up has the full rate.
            epoch += 1.0 / (self.steps_per_epoch or 1)
            return 1.0 / size() * (epoch * (size() - 1) / warmup_epochs + 1)

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        if epoch == (self.end_epoch or 0) - 1 and self.verbose > 0 and rank() == 0:
            optimizer: Any = self.model.optimizer  # type: ignore[attr-defined]
            rate = float(array_of(optimizer.learning_rate))
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.", flush=True)


class SavesOnRoot:
    """For a callback that saves files: it saves on rank 0 only, during an epoch or at the end of one."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Like the wrapped callback's, on rank 0."""
        base: Any = super()
        if rank() == 0:
            base.on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Like the wrapped callback's, on rank 0."""
        base: Any = super()
        if rank() == 0:
            base.on_epoch_end(epoch, logs)
