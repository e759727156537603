# A script as Horovod's users have it for tf.keras of Keras 2: model.fit with the callbacks.
# Touches horovod.tensorflow.keras as they know it; TF_USE_LEGACY_KERAS=1 gives them their Keras.
"""Writes checkpoints and prints an accuracy; the data is made up."""

import numpy as np
import tensorflow as tf

import horovod
import horovod.tensorflow.keras as hvd

hvd.init()
draw = np.random.default_rng(1)
images = draw.standard_normal((512, 8)).astype(np.float32)
labels = (images @ draw.standard_normal((8, 3))).argmax(1)
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).repeat().shuffle(512, seed=hvd.rank()).batch(32)

mnist_model = tf.keras.Sequential(
    [tf.keras.layers.Dense(32, activation="relu"), tf.keras.layers.Dense(3, activation="softmax")]
)
scaled_lr = 0.01 * hvd.size()
opt = tf.optimizers.Adam(scaled_lr)
opt = hvd.DistributedOptimizer(opt, backward_passes_per_step=1, average_aggregated_gradients=True)
mnist_model.compile(
    loss=tf.losses.SparseCategoricalCrossentropy(),
    optimizer=opt,
    metrics=["accuracy"],
    experimental_run_tf_function=False,
)
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=3, verbose=1),
]
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.h5"))
verbose = 1 if hvd.rank() == 0 else 0
history = mnist_model.fit(dataset, steps_per_epoch=50 // hvd.size(), callbacks=callbacks, epochs=6, verbose=verbose)
if hvd.rank() == 0:
    print(f"\naccuracy {history.history['accuracy'][-1]:.3f} with horovod {horovod.__version__}")

# An optimizer of tf.compat.v1, which tf_keras hides from the callback.
model = tf.keras.Sequential([tf.keras.layers.Dense(3)])
model.compile(loss="mse", optimizer=tf.compat.v1.train.AdamOptimizer(scaled_lr))
model.fit(
    images[:32], images[:32, :3], epochs=1, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
)
