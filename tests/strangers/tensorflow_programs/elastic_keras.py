"""Elastic Keras under a launcher that changes nothing: TensorFlowKerasState, a loop of batches and epochs, commits.
Ends with equal weights, and a restore that brings the committed ones back."""

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd

hvd.init()
tf.keras.utils.set_random_seed(1 + hvd.rank())
model = tf.keras.Sequential([tf.keras.layers.Input((3,)), tf.keras.layers.Dense(1)])
optimizer = tf.keras.optimizers.SGD(0.1 * hvd.size())
optimizer.build(model.trainable_variables)
resets = []


@tf.function
def train_one_batch(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x, training=True)))
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, 2):
        for state.batch in range(state.batch, 3):
            x = np.random.RandomState(10 * state.epoch + state.batch + 100 * hvd.rank()).rand(4, 3)
            train_one_batch(tf.constant(x, tf.float32))
            state.commit()
        state.batch = 0


state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0, epoch=0)
state.register_reset_callbacks([lambda: resets.append(1)])
train(state)
assert state.epoch == 1 and not resets
weights = hvd.allgather(model.trainable_variables[0][None]).numpy()
for row in weights:
    np.testing.assert_array_equal(row, weights[0])
kept = model.get_weights()
model.set_weights([w * 0 for w in kept])
state.restore()
np.testing.assert_array_equal(model.get_weights()[0], kept[0])
