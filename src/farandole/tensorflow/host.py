# Runs collectives on the host: directly for eager tensors, through Python callbacks in graphs.
# Touches TensorFlow and NumPy; the rooms base, bindings and engine; the files failures and framework.
"""Used without compiled operations, and always for eager tensors.

In a graph, one node submits and another node waits for the results. TensorFlow has few threads for nodes. A thread that
waits could block the operations that other ranks wait for. So the second node is a dataset with one element: datasets
run on their own threads, and collectives may become ready in any order.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..base.errors import Mismatch, no_rows
from ..bindings.work import Work, begin, results
from ..engine.interface import Array, Kind
from .failures import unless_empty, words
from .framework import tf


def carry_out(work: Work, tensors: Sequence[Any], splits: Any = None) -> list[Any]:
    """Runs the work on these tensors and gives the outputs as tensors."""
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
    """What is known about the shapes of the outputs."""
    if work.kind in (Kind.ALLREDUCE, Kind.BROADCAST):
        return [tensor.shape for tensor in tensors]
    if any(tensor.shape.rank == 0 for tensor in tensors):
        raise no_rows(work.kind.name.lower())
    known = [[None, *tensor.shape[1:]] if tensor.shape.rank is not None else None for tensor in tensors]
    return [*known, [None]] if work.kind == Kind.ALLTOALL else known


def _arrays(tensors: Sequence[Any]) -> list[Array]:
    """A NumPy array for each tensor, without a copy if the tensor is in CPU memory."""
    return [np.asarray(tensor) for tensor in tensors]


def _plain(splits: Any) -> Any:
    return splits.numpy().tolist() if hasattr(splits, "numpy") else splits


def _split(count: int, arrays: Sequence[Any]) -> tuple[list[Array], Any]:
    converted = [np.asarray(array) for array in arrays]
    return converted[:count], converted[count].tolist() if len(converted) > count else None


_numbers = itertools.count(1)
_begun: dict[int, Callable[[], list[Array]]] = {}  # by number: the function that gives the results of pending work


def _submit(work: Work, arrays: Sequence[Array], splits: Any) -> int:
    """Begins the work and gives its number. An error is kept and raised when the results are fetched."""
    number = next(_numbers)
    try:
        begun = begin("tensorflow", work, arrays, splits)
        begun.submit()
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

    def fetch(number: Any) -> list[Any]:
        try:
            return [b"", *_begun.pop(int(number))()]
        except Mismatch as error:
            return [words(error), *(np.zeros((), kind.as_numpy_dtype) for kind in types)]

    # The random number is new in each run of the graph, so TensorFlow cannot compute the nodes after it once and keep
    # them. Stateful nodes would run in order; without state, a submission does not wait for an earlier wait.
    arguments = [tf.random.uniform([], seed=1), *inputs]
    with tf.device("/CPU:0"):
        submitted = tf.numpy_function(submit, arguments, tf.int64, stateful=False, name=f"{work.label}Submit")
        submitted.set_shape([])
        return _on_own_thread(fetch, submitted, types)


def _on_own_thread(function: Callable[[Any], list[Any]], number: Any, types: list[Any]) -> list[Any]:
    """The arrays from the function, which may wait for them: it runs on a thread that only this node uses.

    The first output is the text of a mismatch, or empty.
    """
    options = tf.data.Options()
    options.threading.private_threadpool_size = 1
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False

    # Datasets are made and read in program order: waits begin in that order, but submissions do not.
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def fetched(_: Any) -> tuple[Any, ...]:
        error_text, *outputs = tf.numpy_function(function, [number], [tf.string, *types], stateful=False)
        with tf.control_dependencies([unless_empty(error_text)]):
            return tuple(tf.identity(output) for output in outputs)

    return list(tf.data.Dataset.range(1).map(fetched).with_options(options).get_single_element())


def asked(question: Any, dtype: Any, name: str | None) -> Any:
    """The result of a function of this process: called now in eager mode, and in each run in a graph."""
    if tf.executing_eagerly():
        return tf.convert_to_tensor(question(), dtype)
    kind = dtype.as_numpy_dtype
    answer = tf.numpy_function(lambda: kind(question()), [], dtype, name=name)
    answer.set_shape([])
    return answer
