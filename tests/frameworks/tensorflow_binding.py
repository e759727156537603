# The battery's binding to TensorFlow; run as a program it is one rank of the battery.
# Touches TensorFlow, farandole.tensorflow and the battery.
"""Three bindings: eager tensors, every operation inside a tf.function, every operation in a graph with a session."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from battery.binding import BARRIER, GRADIENTS, JOIN, Binding, Table, TracedBinding, numbers_of
from battery.run import common, run_forms

import farandole.tensorflow as hvd
from farandole.engine.interface import Array, DType
from farandole.tensorflow.failures import translated


class EagerBinding(Binding):
    hvd: Any = hvd
    offers = frozenset({BARRIER, GRADIENTS, JOIN})

    def tensor(self, values: Any, dtype: DType = DType.FLOAT32) -> Any:
        return tf.cast(tf.convert_to_tensor(np.asarray(values)), getattr(tf, dtype.name.lower()))

    def array(self, tensor: Any) -> Array:
        return numbers_of(tensor)

    def dtype_of(self, tensor: Any) -> DType:
        return DType[np.asarray(tensor).dtype.name.upper()]

    def gradient(self, function: Callable[[Any], Any], values: Any, weight: float) -> Array:
        tensor = self.tensor(values)
        with tf.GradientTape() as tape:
            tape.watch(tensor)
            target = tf.reduce_sum(weight * function(tensor))
        return self.array(tf.convert_to_tensor(tape.gradient(target, tensor)))

    def unusable(self) -> dict[str, Any]:
        return {"complex": tf.ones(4, tf.complex64), "strings": tf.constant(["a", "b", "c", "d"])}


class FunctionBinding(TracedBinding, EagerBinding):
    """Each operation is traced and run as a function of its tensors."""

    def traced(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, *args: Any, **kwargs: Any) -> Any:
            inside = tf.function(lambda tensors: operation(tensors, *args, **kwargs), autograph=False)
            try:
                return inside(first)
            except tf.errors.OpError as error:
                raise translated(error) or error from None

        return call


class SessionBinding(FunctionBinding):
    """Each operation is a node of a graph that a session runs; of several, the graph is that of their caller."""

    def tensor(self, values: Any, dtype: DType = DType.FLOAT32) -> Any:
        return np.asarray(values).astype(getattr(tf, dtype.name.lower()).as_numpy_dtype)

    def unusable(self) -> dict[str, Any]:
        return {"complex": np.ones(4, np.complex64), "strings": np.array(["a", "b", "c", "d"])}

    def traced(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, *args: Any, **kwargs: Any) -> Any:
            if not tf.executing_eagerly():
                return operation(first, *args, **kwargs)
            with tf.Graph().as_default(), tf.compat.v1.Session() as session:
                given = [tf.constant(one) for one in first] if isinstance(first, list) else tf.constant(first)
                node = operation(given, *args, **kwargs)
                if isinstance(node, (list, tuple)) and not node:
                    return node
                try:
                    return session.run(node)
                except tf.errors.OpError as error:
                    raise translated(error) or error from None

        return call

    def gradient(self, function: Callable[[Any], Any], values: Any, weight: float) -> Array:
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            tensor = tf.constant(self.tensor(values))
            (found,) = tf.gradients(tf.reduce_sum(weight * function(tensor)), [tensor])
            return self.array(session.run(found))


PATIENCE_S = 120.0  # for one case: graphs are traced and optimised, which takes longer than all that is sent
BINDINGS = {"eager": EagerBinding, "function": FunctionBinding, "session": SessionBinding}


# What a graph does not have: operations without a name, and the line of the script that the warning points to.
NOT_IN_GRAPHS = ("a timeline has the names", "average and op", "many steps with the same names")


def table(form: str) -> Table:
    """The common cases that this form can have."""
    cases = common()
    for name in NOT_IN_GRAPHS if form != "eager" else ():
        del cases[name]
    return cases


if __name__ == "__main__":
    run_forms(sys.argv[1:], BINDINGS, table, variable="FARANDOLE_TENSORFLOW_OPS", patience=PATIENCE_S)
