"""A loop without tf.function: word vectors whose gradients are slices, compression, metrics averaged by allreduce.
Ends with the rows and numbers of one process."""

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd

hvd.init()
words = [np.random.RandomState(rank).randint(0, 12, (5,)) for rank in range(hvd.size())]
first = np.random.RandomState(99).randn(12, 3)


def train(wrap, ranks):
    table = tf.Variable(first)
    for _ in range(3):
        with tf.GradientTape() as tape:
            losses = [tf.reduce_mean(tf.square(tf.nn.embedding_lookup(table, words[rank]))) for rank in ranks]
            loss = tf.add_n(losses) / len(ranks)
        (gradient,) = wrap(tape).gradient(loss, [table])
        if not isinstance(gradient, tf.IndexedSlices):
            table.assign_sub(0.5 * gradient)
        else:
            table.scatter_sub(tf.IndexedSlices(0.5 * gradient.values, gradient.indices))
    return table.numpy(), loss


wanted, wanted_loss = train(lambda tape: tape, range(hvd.size()))
for options in ({}, {"sparse_as_dense": True}, {"op": hvd.Average, "device_dense": "", "device_sparse": "/cpu:0"}):
    found, loss = train(lambda tape, options=options: hvd.DistributedGradientTape(tape, **options), [hvd.rank()])
    np.testing.assert_allclose(found, wanted, rtol=1e-9)
    averaged = hvd.allreduce(loss, name="loss")
    np.testing.assert_allclose(averaged.numpy(), wanted_loss.numpy(), rtol=1e-9)

slices = tf.IndexedSlices(tf.ones((2, 3)), tf.constant([0, hvd.rank() + 1]), dense_shape=(12, 3))
summed = hvd.allreduce(slices, op=hvd.Sum)
assert isinstance(summed, tf.IndexedSlices)
dense = tf.convert_to_tensor(summed).numpy()
assert dense[0].tolist() == [hvd.size()] * 3 and dense[1 : hvd.size() + 1].sum() == 3 * hvd.size()
halved = hvd.allreduce(tf.constant([1.5, 2.5]), compression=hvd.Compression.fp16)
assert halved.dtype == tf.float32 and halved.numpy().tolist() == [1.5, 2.5]
