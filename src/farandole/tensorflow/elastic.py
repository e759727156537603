# Elastic training for TensorFlow: variables as state, and a loop that recognizes engine errors from inside graphs.
# Touches TensorFlow; the rooms base, elastic, engine, keras, operations and world; other files of this room.
"""Replaces `horovod.tensorflow.elastic` in scripts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..base.errors import HorovodInternalError, Mismatch
from ..elastic import loop
from ..elastic.state import ObjectState, State
from ..engine.interface import Array
from ..keras import elastic_bodies
from ..keras.values import broadcast_variables
from ..operations.objects import broadcast_object
from ..world.basics import rank
from . import compiled
from .failures import translated
from .framework import tf

__all__ = ["ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates `func(state, ...)`: calls it again with the last commit when ranks were lost or added.

    This includes engine errors that TensorFlow reports as its own because they happened inside a graph. A mismatch is
    raised unchanged: tf.errors.FailedPreconditionError.
    """

    @functools.wraps(func)
    def with_our_errors(state: State, *args: Any, **kwargs: Any) -> Any:
        compiled.prepare()  # the world may be new
        try:
            return func(state, *args, **kwargs)
        except tf.errors.OpError as error:
            found = translated(error)
            if isinstance(found, HorovodInternalError) and not isinstance(found, Mismatch):
                raise found from error
            raise

    return loop.run(with_our_errors)


class TensorFlowKerasState(elastic_bodies.KerasState):
    """`TensorFlowKerasState(model, optimizer, batch=0, epoch=0)`: the variables of a built Keras model and optimizer.

    `backend` is accepted for compatibility.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, **kwargs)


class TensorFlowState(ObjectState):
    """`TensorFlowState(variables=[...], batch=0)`: variables of TensorFlow, and plain values.

    With `session` the variables belong to its graph. Without `variables`, all global variables are used.
    """

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        self._session = session
        if variables is None:
            variables = tf.compat.v1.global_variables()
        self.variables = list(variables)
        self._copies: list[Array] = []
        super().__init__(broadcast_object, rank, **kwargs)
        self._copies = self._read()

    def _read(self) -> list[Array]:
        if self._session is not None:
            return [np.array(value) for value in self._session.run(self.variables)]
        return [np.array(variable) for variable in self.variables]

    def _write(self, values: Sequence[Array]) -> None:
        if self._session is not None:  # the initializers assign the values
            begin = [variable.initializer for variable in self.variables]
            fed = {node.inputs[1]: value for node, value in zip(begin, values, strict=True)}
            self._session.run(begin, fed)
            return
        for variable, value in zip(self.variables, values, strict=True):
            variable.assign(value)

    def save(self) -> None:
        """Keeps a copy in this rank's memory."""
        self._copies = self._read()
        super().save()

    def restore(self) -> None:
        """Returns to the last copy."""
        self._write(self._copies)
        super().restore()

    def sync(self) -> None:
        """Copies the variables and values of rank 0 to every rank."""
        if self._session is None:
            broadcast_variables(self.variables, 0)
        else:
            self._write(broadcast_object(self._read(), 0, "elastic.variables"))
        super().sync()

    def _saved_bytes(self) -> int:
        return super()._saved_bytes() + sum(copy.nbytes for copy in self._copies)
