"""Process sets with tapes and Keras optimizers, uneven data with join, and an elastic loop of one's own.
Each part ends with numbers computed by hand."""

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as khvd

hvd.init(process_sets="dynamic")
rank, size = hvd.rank(), hvd.size()
lone = [hvd.add_process_set([i]) for i in range(size)]
pair = hvd.add_process_set([0, size - 1]) if size > 2 else hvd.global_process_set
v = tf.Variable([2.0, 3.0])
with tf.GradientTape() as tape:
    loss = tf.reduce_sum(v * (rank + 1.0))
grads = hvd.DistributedGradientTape(tape, process_set=lone[rank]).gradient(loss, [v])
np.testing.assert_allclose(grads[0], [rank + 1.0] * 2)
if pair.included():
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(v * (rank + 1.0))
    grads = hvd.DistributedGradientTape(tape, process_set=pair).gradient(loss, [v])
    np.testing.assert_allclose(grads[0], [(1 + size) / 2] * 2)
    opt = khvd.DistributedOptimizer(tf.keras.optimizers.SGD(1.0), process_set=pair)
    w = tf.Variable([0.0])
    opt.apply_gradients([(tf.constant([float(rank)]), w)])
    np.testing.assert_allclose(w, [-(size - 1) / 2])
for one in lone:
    assert hvd.remove_process_set(one)

# Uneven data: rank r has r + 2 batches.
w = tf.Variable([1.0])
for _ in range(rank + 2):
    with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum) as tape:
        loss = tf.reduce_sum(w * 1.0)
    w.assign_sub(tape.gradient(loss, [w])[0])
last = int(hvd.join())
assert last == size - 1
hvd.broadcast_variables([w], root_rank=last)
np.testing.assert_allclose(w, [1.0 - sum(range(2, size + 2))])

# An elastic loop in one generation: the state is the root's, and a second call goes on.
model = tf.keras.Sequential([tf.keras.layers.Input((1,)), tf.keras.layers.Dense(1, kernel_initializer="ones")])
model.layers[0].kernel.assign([[5.0 + rank]])
opt = tf.keras.optimizers.SGD(0.5)
opt.build(model.trainable_variables)
state = hvd.elastic.TensorFlowKerasState(model, optimizer=opt, batch=0, commits=rank)
resets = []
state.register_reset_callbacks([lambda: resets.append(1)])


@hvd.elastic.run
def train(state, until):
    while state.batch < until:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tf.ones((1, 1))))
        grads = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
        opt.apply_gradients(zip(grads, model.trainable_variables))
        state.batch += 1
        if state.batch % 2 == 0:
            state.commit()
    return state.batch


assert train(state, 3) == 3
np.testing.assert_allclose(model.layers[0].kernel, [[5.0 - 1.5]])
assert state.commits == 0 and not resets
state.restore()  # to batch 2
assert state.batch == 2
np.testing.assert_allclose(model.layers[0].kernel, [[5.0 - 1.0]])
variables = hvd.elastic.TensorFlowState([w], batch=rank)
w.assign([float(rank)])
variables.sync()
assert variables.batch == 0 and float(w[0]) == 0.0
