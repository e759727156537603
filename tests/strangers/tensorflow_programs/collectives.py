"""Collectives by themselves: gradients through them, splits, groups of tensors, objects, join, process sets.
Ends with numbers of NumPy."""

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd

hvd.init(process_sets="dynamic")
rank, size = hvd.rank(), hvd.size()


@tf.function
def inside(x):
    return hvd.allreduce(x, op=hvd.Sum, name="inside"), hvd.allgather(x[None])


total, rows = inside(tf.constant([1.0, 2.0]) * (rank + 1))
assert total.numpy().tolist() == [size * (size + 1) / 2, float(size * (size + 1))]
assert rows.numpy().tolist() == [[1.0 * r, 2.0 * r] for r in range(1, size + 1)]
x = tf.Variable([float(rank + 1)] * 2)
with tf.GradientTape() as tape:
    y = hvd.allreduce(x, op=hvd.Sum) * (rank + 1)
assert tape.gradient(y, x).numpy().tolist() == [size * (size + 1) / 2] * 2
received, splits = hvd.alltoall(tf.range(size * (size + 1) // 2), splits=tf.range(1, size + 1))
assert splits.numpy().tolist() == [rank + 1] * size
block = list(range(rank * (rank + 1) // 2, (rank + 1) * (rank + 2) // 2))
assert received.numpy().tolist() == block * size
one, two = hvd.grouped_allreduce([tf.ones(2), tf.ones((1, 2), tf.float64)], op=hvd.Average)
assert one.numpy().tolist() == [1.0, 1.0] and two.dtype == tf.float64
assert hvd.reducescatter(tf.ones((size + 1, 2)), op=hvd.Sum).shape[0] == (2 if rank == 0 else 1)
assert hvd.broadcast_object({"rank": rank}, root_rank=size - 1) == {"rank": size - 1}
assert hvd.allgather_object("r%d" % rank) == ["r%d" % r for r in range(size)]
variable = tf.Variable(np.full((2, 2), float(rank)))
hvd.broadcast_([variable], root_rank=size - 1)
assert variable.numpy().tolist() == [[size - 1.0] * 2] * 2
last = hvd.add_process_set([size - 1])
if last.included():
    assert hvd.allreduce(tf.constant(3.0), op=hvd.Sum, process_set=last).numpy() == 3.0
assert hvd.size_op(process_set_id=last.process_set_id).numpy() == 1
hvd.remove_process_set(last)
for _ in range(rank):
    hvd.allreduce(tf.ones(1), name="uneven")
assert int(hvd.join()) == size - 1
try:
    hvd.allreduce(tf.ones(2 + rank), name="differs")
    assert size == 1
except (tf.errors.FailedPreconditionError, RuntimeError) as error:
    assert "Mismatched ALLREDUCE tensor shapes" in str(error)
assert hvd.allreduce(tf.ones(1), op=hvd.Sum).numpy().tolist() == [size]
