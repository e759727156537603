"""TensorFlow's and Keras's rows of bench/frameworks.py, and tf.distribute.MultiWorkerMirroredStrategy beside them.
The same exchange, the same turns, with torch's row as the measure: `python bench/frameworks_tf.py`."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from typing import Any

import frameworks  # beside this file

Step = Callable[[], Any]


def tensorflow_step() -> tuple[Any, Step]:
    """What tapes and optimizers do with the gradients of a step, in a function."""
    import tensorflow as tf

    import farandole.tensorflow as hvd
    from farandole.tensorflow.gradients import Reduction

    hvd.init()
    tensors = [tf.ones(shape) for shape in frameworks.SHAPES]
    exchange = tf.function(lambda gradients: Reduction()(gradients, gradients), autograph=False)
    return hvd, lambda: exchange(tensors)


def keras_step() -> tuple[Any, Step]:
    """The same inside a Keras optimizer, without its update."""
    import keras
    import tensorflow as tf

    import farandole.keras as hvd
    from farandole import barrier

    hvd.init()
    hvd.barrier = barrier
    tensors = [tf.ones(shape) for shape in frameworks.SHAPES]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    exchange = tf.function(lambda gradients: optimizer._farandole(gradients, gradients), autograph=False)
    return hvd, lambda: exchange(tensors)


def strategy_step() -> tuple[Any, Step]:
    """TensorFlow's own: the same gradients through a replica context's all_reduce."""
    import farandole as hvd

    hvd.init()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        own = f"127.0.0.1:{probe.getsockname()[1]}"
    workers = hvd.allgather_object(own)
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": {"worker": workers}, "task": {"type": "worker", "index": hvd.rank()}}
    )
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    tensors = [tf.ones(shape) for shape in frameworks.SHAPES]

    def reduced(gradients: list[Any]) -> Any:
        own = [tf.identity(gradient) for gradient in gradients]  # made on the replica's device, as gradients are
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, own)

    exchange = tf.function(lambda gradients: strategy.run(reduced, (gradients,)), autograph=False)
    return hvd, lambda: exchange(tensors)


_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "", "KERAS_BACKEND": "tensorflow"}
ROWS: dict[str, tuple[str, Callable[[], tuple[Any, Step]], dict[str, str]]] = {
    "tensorflow": ("tensorflow", tensorflow_step, {"FARANDOLE_TENSORFLOW_OPS": "compiled", **_QUIET}),
    "tensorflow, callback": ("tensorflow", tensorflow_step, {"FARANDOLE_TENSORFLOW_OPS": "callback", **_QUIET}),
    "keras": ("tensorflow", keras_step, {"FARANDOLE_TENSORFLOW_OPS": "compiled", **_QUIET}),
    "MultiWorkerMirrored": ("tensorflow", strategy_step, _QUIET),
}

if __name__ == "__main__":
    frameworks.ROWS = {"torch": frameworks.ROWS["torch"], **ROWS}
    frameworks.__file__ = __file__  # its ranks run this file
    frameworks.main()
