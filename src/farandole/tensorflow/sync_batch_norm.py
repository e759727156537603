# Batch normalisation over the batches of all ranks.
# Touches tf.keras; the rooms bindings.private, operations and world; the files framework and ops.
"""`SyncBatchNormalization` replaces `tf.keras.layers.BatchNormalization`."""

from __future__ import annotations

import inspect
from typing import Any

from ..bindings.private.tensorflow_names import moments_of
from ..operations.reductions import Sum
from ..world.groups import global_process_set
from .framework import tf
from .ops import allreduce

_ASKS: Any = moments_of(tf.keras.layers.BatchNormalization)
_PARAMETERS = () if _ASKS is None else tuple(inspect.signature(_ASKS).parameters)  # tf_keras and Keras 3 differ


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):  # type: ignore[misc]
    """Normalises with the mean and variance over the batches of all ranks; the batches may differ in size."""

    def __init__(self, fused: Any = False, **kwargs: Any) -> None:
        if fused in (True, None):
            raise ValueError(f"SyncBatchNormalization does not support fused={fused}: leave it out")
        if _ASKS is None:
            raise NotImplementedError(
                "SyncBatchNormalization does not support this release of Keras, which would take the statistics of one "
                "rank: upgrade farandole, or take an older Keras"
            )
        kwargs.setdefault("name", None)
        super().__init__(**kwargs)

    def _moments(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The statistics of all ranks. Keras 3 passes a mask; tf_keras passes the axes and the shape of the result."""
        axes, keep, mask = self._asked(inputs, args, kwargs)
        if mask is not None:
            raise NotImplementedError("SyncBatchNormalization does not support masks")
        values = tf.cast(inputs, tf.float64 if inputs.dtype == tf.float64 else tf.float32)
        channels = [axis for axis in range(inputs.shape.rank) if axis not in axes]
        own = tf.cast(tf.reduce_prod(tf.gather(tf.shape(values), axes)), values.dtype)
        # Two reductions instead of one with sums of squares: this way large means do not reduce precision.
        total, first = _summed([own[tf.newaxis], tf.reduce_sum(values, axes)])
        mean = first / total
        shape = [inputs.shape[axis] if axis in channels else 1 for axis in range(inputs.shape.rank)]
        centred = values - tf.reshape(mean, shape)
        [squares] = _summed([tf.reduce_sum(tf.square(centred), axes)])
        variance = squares / total
        if keep:
            mean, variance = tf.reshape(mean, shape), tf.reshape(variance, shape)
        return tf.cast(mean, inputs.dtype), tf.cast(variance, inputs.dtype)

    def _asked(self, inputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[int], bool, Any]:
        if "reduction_axes" not in _PARAMETERS:
            channels = self.axis % inputs.shape.rank
            mask = args[0] if args else kwargs.get("mask")
            return [axis for axis in range(inputs.shape.rank) if axis != channels], False, mask
        axes = args[0] if args else kwargs["reduction_axes"]
        keep = args[1] if len(args) > 1 else kwargs["keep_dims"]
        return [axis % inputs.shape.rank for axis in axes], bool(keep), kwargs.get("mask")


def _summed(tensors: list[Any]) -> list[Any]:
    flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)
    parts = tf.split(allreduce(flat, op=Sum, process_set=global_process_set), [tf.size(one) for one in tensors])
    return [tf.reshape(part, tf.shape(one)) for part, one in zip(parts, tensors, strict=True)]
