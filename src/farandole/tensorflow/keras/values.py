# Allreduce outside the training step for tf.keras: with TensorFlow's compressors, for Keras 3 and tf_keras.
# Touches TensorFlow; the rooms keras, operations, tensorflow.compression and tensorflow.framework.
"""The other functions for values are the same for all kinds of Keras."""

from __future__ import annotations

from typing import Any

from ...keras.framework import array_of
from ...keras.values import compressed, reduction
from ...operations.pending import chosen_op
from ..compression import Compression
from ..framework import tf


def allreduce(
    value: Any, name: str | None = None, average: bool | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, op: Any = None, compression: Any = Compression.none,
) -> Any:  # fmt: skip
    """The reduction of all ranks' values; the average if `op` is not given."""
    reduce = reduction(name, chosen_op(op, average), prescale_factor, postscale_factor)
    if compression is Compression.none:
        return reduce(array_of(value))
    return compressed(value, compression, tf.convert_to_tensor, array_of, reduce)
