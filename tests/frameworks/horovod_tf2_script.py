# A typical script of a Horovod user for TensorFlow 2: its own training loop with a DistributedGradientTape.
# Touches only the public names of horovod.tensorflow.
"""Writes a checkpoint and prints an accuracy; the data is made up."""

from typing import Any

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd

hvd.init()
gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

draw = np.random.default_rng(1)
images = draw.standard_normal((512, 8)).astype(np.float32)
labels = (images @ draw.standard_normal((8, 3))).argmax(1)
dataset = tf.data.Dataset.from_tensor_slices((images, labels.astype(np.int64)))
dataset = dataset.repeat().shuffle(512, seed=hvd.rank()).batch(32)

mnist_model = tf.keras.Sequential(
    [tf.keras.layers.Dense(32, activation="relu"), tf.keras.layers.Dense(3, activation="softmax")]
)
loss = tf.losses.SparseCategoricalCrossentropy()
opt = tf.optimizers.Adam(0.01 * hvd.size())
checkpoint = tf.train.Checkpoint(model=mnist_model)


@tf.function
def training_step(images: Any, labels: Any, first_batch: bool) -> Any:
    with tf.GradientTape() as tape:
        probs = mnist_model(images, training=True)
        loss_value = loss(labels, probs)
    tape = hvd.DistributedGradientTape(tape)
    grads = tape.gradient(loss_value, mnist_model.trainable_variables)
    opt.apply_gradients(zip(grads, mnist_model.trainable_variables))  # noqa: B905
    if first_batch:
        hvd.broadcast_variables(mnist_model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables, root_rank=0)
    return loss_value


for batch, (batch_images, batch_labels) in enumerate(dataset.take(200 // hvd.size())):
    loss_value = training_step(batch_images, batch_labels, batch == 0)
    if batch % 50 == 0 and hvd.local_rank() == 0:
        print(f"Step #{batch}\tLoss: {loss_value:.6f}")

right = tf.reduce_mean(tf.cast(tf.argmax(mnist_model(images), 1) == labels, tf.float32))
right = hvd.allreduce(right, name="right")
if hvd.rank() == 0:
    checkpoint.save("./checkpoints")
    print(f"accuracy {right:.3f}")
