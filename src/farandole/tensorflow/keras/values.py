# Allreduce beside the training step for tf.keras: with TensorFlow's compressors, for Keras 3 and for tf_keras.
# Touches TensorFlow, compression, the NumPy layer and farandole.keras.
"""The rest of what is done with values is the same for all of Keras."""

from __future__ import annotations

from typing import Any

from ... import ops
from ...keras.framework import array_of
from ...keras.values import compressed
from ...pending import chosen_op
from ..compression import Compression
from ..framework import tf


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = Compression.none,
) -> Any:
    """The reduction of all ranks' values; the average unless `op` says otherwise."""
    chosen = chosen_op(op, average)

    def reduce(array: Any) -> Any:
        return ops.allreduce(array, None, name, chosen, prescale_factor, postscale_factor)

    if compression is Compression.none:
        return reduce(array_of(value))
    return compressed(value, compression, tf.convert_to_tensor, array_of, reduce)
