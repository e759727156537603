# How work gets done on the host: at once on eager tensors, by a callback of Python in graphs.
# Touches TensorFlow, NumPy, work and the NumPy layer.
"""The way without a compiler, and the only one of eager tensors.

In a graph one node submits and another waits for the results. TensorFlow runs what is ready on few threads, and one
that waits would keep others from the very operations that other ranks wait for. So the second node is a dataset with
one element: datasets are computed on threads of their own, and collectives may become ready in any order.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..engine import Array, Kind
from ..work import Work, begin, results
from .framework import tf


def carry_out(work: Work, tensors: Sequence[Any], splits: Any = None) -> list[Any]:
    """The outputs of the work on these tensors, as tensors."""
    if tf.executing_eagerly():
        rows = None if splits is None else _plain(splits)
        return [
            tf.convert_to_tensor(array) for array in results(work, begin("tensorflow", work, _arrays(tensors), rows))
        ]
    inputs = [*tensors] if splits is None else [*tensors, splits]
    types = [tensor.dtype for tensor in tensors] + [tf.int32] * (work.kind == Kind.ALLTOALL)
    outputs = _callback(work, len(tensors), inputs, types)
    for output, shape in zip(outputs, shapes(work, tensors), strict=True):
        output.set_shape(shape)
    return outputs


def shapes(work: Work, tensors: Sequence[Any]) -> list[Any]:
    """What is known of the outputs' shapes."""
    if work.kind in (Kind.ALLREDUCE, Kind.BROADCAST):
        return [tensor.shape for tensor in tensors]
    if any(tensor.shape.rank == 0 for tensor in tensors):
        raise ValueError(f"{work.kind.name.lower()} needs a tensor with at least one dimension; reshape it to (1,)")
    known = [[None, *tensor.shape[1:]] if tensor.shape.rank is not None else None for tensor in tensors]
    return [*known, [None]] if work.kind == Kind.ALLTOALL else known


def _arrays(tensors: Sequence[Any]) -> list[Array]:
    """NumPy's view of each; without a copy where the tensor lies in the memory of the CPU."""
    return [np.asarray(tensor) for tensor in tensors]


def _plain(splits: Any) -> Any:
    return splits.numpy().tolist() if hasattr(splits, "numpy") else splits


def _split(count: int, arrays: Sequence[Any]) -> tuple[list[Array], Any]:
    given = [np.asarray(array) for array in arrays]
    return given[:count], given[count].tolist() if len(given) > count else None


_numbers = itertools.count(1)
_begun: dict[int, Callable[[], list[Array]]] = {}  # by number: what gives the results of work that is under way


def _submit(work: Work, arrays: Sequence[Array], splits: Any) -> int:
    """Begins the work and gives its number; errors are kept for whoever fetches the results."""
    number = next(_numbers)
    try:
        begun = begin("tensorflow", work, arrays, splits)
        begun.under_way()
    except Exception as error:
        _begun[number] = functools.partial(_fail, error)
    else:
        _begun[number] = functools.partial(results, work, begun)
    return number


def _fail(error: Exception) -> list[Array]:
    raise error


def _callback(work: Work, count: int, inputs: list[Any], types: list[Any]) -> list[Any]:
    def submit(_: Any, *arrays: Any) -> Any:
        own, rows = _split(count, arrays)
        return np.int64(_submit(work, own, rows))

    def fetch(number: Any) -> list[Array]:
        return _begun.pop(int(number))()

    # A random number is made whenever the graph runs, so that what depends on it is not computed once and kept. Unlike
    # other operations with a state these have no order: the submission is not held back by a wait before it.
    given = [tf.random.uniform([], seed=1), *inputs]
    with tf.device("/CPU:0"):
        submitted = tf.numpy_function(submit, given, tf.int64, stateful=False, name=f"{work.label}Submit")
        submitted.set_shape([])
        return _on_own_thread(fetch, submitted, types)


def _on_own_thread(function: Callable[[Any], list[Array]], number: Any, types: list[Any]) -> list[Any]:
    """The arrays that the function gives, which may wait for them: it runs on a thread of this node's alone."""
    options = tf.data.Options()
    options.threading.private_threadpool_size = 1
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False

    # Datasets are made and read in the order of the program: waits begin in that order, submissions do not.
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def fetched(_: Any) -> tuple[Any, ...]:
        return tuple(_listed(tf.numpy_function(function, [number], types, stateful=False)))

    return list(tf.data.Dataset.range(1).map(fetched).with_options(options).get_single_element())


def _listed(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


def asked(question: Any, dtype: Any, name: str | None) -> Any:
    """The answer of a function of this process: now in eager mode, each time it runs in a graph."""
    if tf.executing_eagerly():
        return tf.convert_to_tensor(question(), dtype)
    kind = dtype.as_numpy_dtype
    answer = tf.numpy_function(lambda: kind(question()), [], dtype, name=name)
    answer.set_shape([])
    return answer
