"""Tables that are divided among the ranks: ids go to their owner by alltoall and the rows come back, with gradients,
inside tf.function; dense layers stay with every rank. Ends with the numbers of one process."""

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
whole = np.random.RandomState(3).rand(4 * size, 3)
ids = np.random.RandomState(4).randint(0, 4 * size, (size, 6))
table = tf.Variable(whole[rank::size])
dense = tf.Variable(np.ones((3, 1)))


@tf.function
def step(own):
    owners = own % size
    order = tf.argsort(owners, stable=True)
    counts = tf.math.bincount(owners, minlength=size, maxlength=size, dtype=tf.int32)
    with tf.GradientTape() as tape:
        asked, received = hvd.alltoall(tf.gather(own, order), splits=counts, name="ids")
        rows = tf.gather(table, asked // size)
        back, _ = hvd.alltoall(rows, splits=received, name="rows")
        found = tf.gather(back, tf.argsort(order))
        loss = tf.reduce_sum(tf.square(tf.matmul(found, dense))) / size
    tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
    tape.register_local_source(table)
    return found, loss, tape.gradient(loss, [table, dense])


tape_scale = 1.0 / size  # local gradients are divided by the size, as averages are
found, loss, (of_table, of_dense) = step(tf.constant(ids[rank]))
np.testing.assert_allclose(found, whole[ids[rank]])
wanted = np.zeros_like(whole)
flat = whole[ids.reshape(-1)]
np.add.at(wanted, ids.reshape(-1), 2 * flat.sum(1, keepdims=True) / size)
np.testing.assert_allclose(tf.convert_to_tensor(of_table), wanted[rank::size] * tape_scale, rtol=1e-6)
np.testing.assert_allclose(of_dense, (2 * flat * flat.sum(1, keepdims=True) / size).sum(0)[:, None], rtol=1e-6)
total = hvd.allreduce(loss, op=hvd.Sum)
np.testing.assert_allclose(total, np.square(flat.sum(1)).sum() / size)

# Shards of gradients: reducescatter there, allgather back.
parts = hvd.grouped_reducescatter([tf.range(7.0) + rank, tf.ones((size, 2))], op=hvd.Sum)
again = hvd.grouped_allgather(parts)
np.testing.assert_allclose(again[0], np.arange(7.0) * size + sum(range(size)))
np.testing.assert_allclose(again[1], np.full((size, 2), size))
with tf.GradientTape() as tape:
    v = tf.Variable(np.arange(4.0 * size))
    out = tf.reduce_sum(hvd.reducescatter(v * (rank + 1.0), op=hvd.Sum) ** 2)
np.testing.assert_allclose(
    tape.gradient(out, v), 2 * np.arange(4.0 * size) * sum(range(1, size + 1)) * (rank + 1.0) * size
)
