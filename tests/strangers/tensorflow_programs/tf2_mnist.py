"""TensorFlow 2's first script: a tape in a tf.function, variables broadcast after a batch, a checkpoint of rank 0.
Ends with the weights of one process that saw all ranks' batches."""

import os
import tempfile

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd

hvd.init()
gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
images = np.random.RandomState(0).rand(8 * 4 * hvd.size(), 6).astype("float32")
labels = (images.sum(1) > 3).astype("int64")


def shard(rank):
    where = slice(rank, None, hvd.size())
    return tf.data.Dataset.from_tensor_slices((images[where], labels[where])).batch(8)


def make(seed):
    tf.keras.utils.set_random_seed(seed)
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input((6,)),
            tf.keras.layers.Dense(5, activation="relu"),
            tf.keras.layers.Dense(2, activation="softmax"),
        ]
    )
    return model, tf.keras.optimizers.Adam(0.001 * hvd.size())


loss = tf.losses.SparseCategoricalCrossentropy()
mnist_model, opt = make(hvd.rank())
checkpoint_dir = tempfile.mkdtemp()
checkpoint = tf.train.Checkpoint(model=mnist_model, optimizer=opt)


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        probs = mnist_model(images, training=True)
        loss_value = loss(labels, probs)
    tape = hvd.DistributedGradientTape(tape)
    grads = tape.gradient(loss_value, mnist_model.trainable_variables)
    opt.apply_gradients(zip(grads, mnist_model.trainable_variables))
    if first_batch:
        hvd.broadcast_variables(mnist_model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables, root_rank=0)
    return loss_value


hvd.broadcast_variables(mnist_model.variables, root_rank=0)  # the first step must also equal that of one process
start = [v.numpy() for v in mnist_model.variables]
for batch, (x, y) in enumerate(shard(hvd.rank()).take(4)):
    loss_value = training_step(x, y, batch == 0)
if hvd.rank() == 0:
    checkpoint.save(os.path.join(checkpoint_dir, "ckpt"))
assert bool(os.listdir(checkpoint_dir)) is (hvd.rank() == 0)
for name in os.listdir(checkpoint_dir):
    os.remove(os.path.join(checkpoint_dir, name))
os.rmdir(checkpoint_dir)

single, single_optimizer = make(0)
for variable, value in zip(single.variables, start):
    variable.assign(value)
for parts in zip(*[shard(rank) for rank in range(hvd.size())]):
    with tf.GradientTape() as tape:
        total = sum(loss(y, single(x, training=True)) for x, y in parts) / hvd.size()
    single_optimizer.apply_gradients(zip(tape.gradient(total, single.trainable_variables), single.trainable_variables))
for ours, theirs in zip(mnist_model.variables, single.variables):
    np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-4, atol=1e-6)
