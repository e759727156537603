# The state that an elastic Keras job commits, and the code of its callbacks: the same for Keras 3 and tf_keras.
# Touches elastic, objects, values and framework; imports no Keras.
"""`KerasState` contains a model, its optimizer, and plain values such as `batch` and `epoch`."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..elastic.state import ObjectState
from ..engine.interface import Array
from ..operations.objects import broadcast_object
from ..world.basics import rank
from .framework import array_of, assign, variables_of
from .values import broadcast_variables


class KerasState(ObjectState):
    """`KerasState(model, batch=0, epoch=0)`: the variables of a built model and of its optimizer, and plain values."""

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not getattr(model, "built", True):
            raise ValueError("the model has no variables yet: call it once, or model.build(shape), before KerasState")
        self.model = model
        self._optimizer = optimizer
        self._copies: list[Array] = []
        super().__init__(broadcast_object, rank, **kwargs)
        self._keep_variables()

    @property
    def optimizer(self) -> Any:
        """The given optimizer, or the optimizer of the model."""
        return self._optimizer if self._optimizer is not None else getattr(self.model, "optimizer", None)

    @optimizer.setter
    def optimizer(self, value: Any) -> None:
        self._optimizer = value

    def _variables(self) -> list[Any]:
        return variables_of(self.model, self.optimizer)

    def _keep_variables(self) -> None:
        self._copies = [np.array(array_of(variable)) for variable in self._variables()]

    def save(self) -> None:
        """Keeps a copy in this rank's memory."""
        self._keep_variables()
        super().save()

    def restore(self) -> None:
        """Returns to the last copy; the variables of an optimizer that was built later become zero."""
        variables = self._variables()
        for variable, value in zip(variables, self._copies, strict=False):
            assign(variable, value)
        for variable in variables[len(self._copies) :]:
            assign(variable, np.zeros_like(array_of(variable)))
        super().restore()

    def sync(self) -> None:
        """Copies rank 0's variables and values to every rank; ranks that have not trained yet build their optimizer."""
        self._build_optimizer()
        broadcast_variables(self._variables(), 0)
        super().sync()

    def _build_optimizer(self) -> None:
        optimizer = self.optimizer
        if optimizer is not None and hasattr(optimizer, "build") and not getattr(optimizer, "built", False):
            optimizer.build(self.model.trainable_variables)

    def _saved_bytes(self) -> int:
        return super()._saved_bytes() + sum(copy.nbytes for copy in self._copies)


# The hooks have the names of Horovod's callbacks, as in bodies.py.


class Commit:
    """Commits the state after every `batches_per_commit` batches and at the end of each epoch."""

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        self.batches_remaining = self.batches_per_commit

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.commit()

    def commit(self) -> None:
        self.batches_remaining = self.batches_per_commit
        self.state.commit()


class UpdateBatch:
    """Keeps `state.batch` up to date; for other callbacks, puts the remaining batches into `params["steps"]`."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.steps_per_epoch: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self.steps_per_epoch = None  # it is known again when this fit's first epoch begins

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        params: Any = self.params  # type: ignore[attr-defined]
        self.steps_per_epoch = self.steps_per_epoch or params.get("steps")
        if self.steps_per_epoch:
            params["steps"] = self.steps_per_epoch - self.state.batch

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = 0


class UpdateEpoch:
    """Keeps `state.epoch` up to date."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch = self.initial_epoch + epoch + 1
