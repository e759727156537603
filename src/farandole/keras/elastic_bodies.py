# What an elastic Keras job commits, and what its callbacks do: the same for Keras 3 and for tf_keras.
# Touches elastic, objects, values and framework; imports no Keras.
"""`KerasState` holds a model, its optimizer, and plain values such as `batch` and `epoch`."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..elastic.state import ObjectState
from ..engine import Array
from ..objects import broadcast_object
from ..runtime import rank
from .framework import array_of, variables_of
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
        """The one that was given, or the model's."""
        return self._optimizer if self._optimizer is not None else getattr(self.model, "optimizer", None)

    def _variables(self) -> list[Any]:
        return variables_of(self.model, self.optimizer)

    def _keep_variables(self) -> None:
        self._copies = [np.array(array_of(variable)) for variable in self._variables()]

    def save(self) -> None:
        """Keeps a copy in memory, on this rank alone."""
        self._keep_variables()
        super().save()

    def restore(self) -> None:
        """Goes back to the last copy; an optimizer that has been built since begins at zero."""
        variables = self._variables()
        for variable, value in zip(variables, self._copies, strict=False):
            variable.assign(value)
        for variable in variables[len(self._copies) :]:
            variable.assign(np.zeros_like(array_of(variable)))
        super().restore()

    def sync(self) -> None:
        """Gives every rank rank 0's variables and values; ranks that have not trained yet build their optimizer."""
        self._build_optimizer()
        broadcast_variables(self._variables(), 0)
        super().sync()

    def _build_optimizer(self) -> None:
        optimizer = self.optimizer
        if optimizer is not None and hasattr(optimizer, "build") and not getattr(optimizer, "built", False):
            optimizer.build(self.model.trainable_variables)

    def _saved_bytes(self) -> int:
        return super()._saved_bytes() + sum(copy.nbytes for copy in self._copies)


class Commit:
    """Commits the state every so many batches."""

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self._left = batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._left -= 1
        if self._left == 0:
            self._left = self.batches_per_commit
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._left = self.batches_per_commit
        self.state.commit()


class UpdateBatch:
    """Keeps `state.batch` up to date; tells callbacks that look at `params["steps"]` how many batches are left."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._steps: int | None = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        params: Any = self.params  # type: ignore[attr-defined]
        self._steps = self._steps or params.get("steps")
        if self._steps:
            params["steps"] = self._steps - self.state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = 0


class UpdateEpoch:
    """Keeps `state.epoch` up to date."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._initial = state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch = self._initial + epoch + 1
