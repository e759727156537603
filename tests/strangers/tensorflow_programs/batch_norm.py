"""SyncBatchNormalization in a model: statistics of all ranks' batches.
Ends with the outputs and moving values of the whole batch."""

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd

hvd.init()
x = np.random.RandomState(0).randn(6 * hvd.size(), 3).astype("float32")
ours, theirs = hvd.SyncBatchNormalization(axis=-1, momentum=0.5), tf.keras.layers.BatchNormalization(momentum=0.5)
for _ in range(2):
    out = ours(x[hvd.rank() * 6 : hvd.rank() * 6 + 6], training=True)
    whole = theirs(x, training=True)
np.testing.assert_allclose(out, whole[hvd.rank() * 6 : hvd.rank() * 6 + 6], rtol=1e-3, atol=1e-4)
np.testing.assert_allclose(ours.moving_mean, theirs.moving_mean, rtol=1e-4, atol=1e-5)
np.testing.assert_allclose(ours.moving_variance, theirs.moving_variance, rtol=1e-3)
try:
    hvd.SyncBatchNormalization(fused=True)
    raise AssertionError("fused")
except ValueError:
    pass
