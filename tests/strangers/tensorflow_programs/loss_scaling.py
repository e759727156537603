"""A custom loop in tf.function with loss scaling, fp16 gradients and a broadcast after the first batch; then a
checkpoint of rank 0 that all ranks restore. Ends with the weights of one process."""

import os
import tempfile

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd

hvd.init()
x = np.random.RandomState(0).rand(4, hvd.size(), 8, 3).astype("float32")
y = x.sum(-1, keepdims=True)


def make(seed):
    tf.keras.utils.set_random_seed(seed)
    return tf.keras.Sequential(
        [tf.keras.layers.Input((3,)), tf.keras.layers.Dense(4, "tanh"), tf.keras.layers.Dense(1)]
    )


model = make(hvd.rank())
opt = tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD(0.1 * hvd.size()), initial_scale=128.0)
opt.build(model.trainable_variables)


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(images, training=True) - labels))
        scaled = opt.scale_loss(loss)
    tape = hvd.DistributedGradientTape(tape, compression=hvd.Compression.fp16)
    grads = tape.gradient(scaled, model.trainable_variables)
    if not first_batch:
        opt.apply_gradients(zip(grads, model.trainable_variables))
    else:  # nothing to learn from weights that differ
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables, root_rank=0)
    return loss


losses = []
for batch in range(-1, 4):
    loss = training_step(x[batch, hvd.rank()], y[batch, hvd.rank()], batch == -1)
    losses.append(float(hvd.allreduce(loss, name="loss")))
folder = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None, root_rank=0)
checkpoint = tf.train.Checkpoint(model=model, optimizer=opt)
prefix = os.path.join(folder, "ckpt")
written = checkpoint.save(prefix) if hvd.rank() == 0 else None
written = hvd.broadcast_object(written, root_rank=0, name="path")
kept = [w.copy() for w in model.get_weights()]
for variable in model.trainable_variables:
    variable.assign(tf.zeros_like(variable))
checkpoint.restore(written).assert_existing_objects_matched()
for ours, theirs in zip(model.get_weights(), kept):
    np.testing.assert_array_equal(ours, theirs)

alone = make(0)
for batch in range(4):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(alone(x[batch].reshape(-1, 3)) - y[batch].reshape(-1, 1)))
    np.testing.assert_allclose(losses[batch + 1], float(loss), rtol=2e-2)
    for variable, gradient in zip(alone.trainable_variables, tape.gradient(loss, alone.trainable_variables)):
        variable.assign_sub(0.1 * hvd.size() * gradient)
for ours, theirs in zip(model.get_weights(), alone.get_weights()):
    np.testing.assert_allclose(ours, theirs, rtol=2e-2, atol=2e-3)
