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

# Keras of TensorFlow 1: a graph in a session, whose callbacks read and write variables through it.
with tf.Graph().as_default():
    backend = tf.compat.v1.keras.backend
    backend.set_session(tf.compat.v1.Session())
    model = tf.keras.Sequential([tf.keras.layers.Dense(3, activation="softmax", input_shape=(8,))])
    model.compile(
        loss="sparse_categorical_crossentropy",
        optimizer=hvd.DistributedOptimizer(tf.keras.optimizers.legacy.SGD(scaled_lr, momentum=0.9)),
    )
    history = model.fit(
        images[hvd.rank() :: hvd.size()], labels[hvd.rank() :: hvd.size()], batch_size=32, epochs=3, verbose=0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=2),
        ],
    )  # fmt: skip
    weights = hvd.allgather(np.concatenate([weight.reshape(-1) for weight in model.get_weights()])[None])
    assert (weights == weights[0]).all() and history.history["loss"][-1] < history.history["loss"][0]
    np.testing.assert_allclose(
        [history.history["lr"][-1], backend.get_value(model.optimizer.momentum)], [scaled_lr, 0.9]
    )

# Several passes in an optimizer that makes its variables at its first step.
weight = tf.Variable([1.0, 2.0])
opt = hvd.DistributedOptimizer(tf.keras.optimizers.legacy.SGD(0.1, momentum=0.9), backward_passes_per_step=2)


@tf.function
def one_pass() -> None:
    opt.apply_gradients([(tf.ones(2) * (hvd.rank() + 1.0), weight)])


one_pass()
one_pass()
np.testing.assert_allclose(weight, np.array([1.0, 2.0]) - 0.1 * (hvd.size() + 1), rtol=1e-6)
