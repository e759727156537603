"""model.fit with horovod.tensorflow.keras: broadcast, averaged metrics, warm-up, checkpoints and words of rank 0 alone.
Ends with the weights of one process, and the same history on all ranks."""

import os
import tempfile

import numpy as np
import tensorflow as tf

import horovod.tensorflow.keras as hvd

hvd.init()
x = np.random.RandomState(0).rand(16 * hvd.size(), 4).astype("float32")
y = x.sum(1, keepdims=True)


def make(seed):
    tf.keras.utils.set_random_seed(seed)
    model = tf.keras.Sequential(
        [tf.keras.layers.Input((4,)), tf.keras.layers.Dense(3, activation="tanh"), tf.keras.layers.Dense(1)]
    )
    return model


scaled_lr = 0.01 * hvd.size()
folder = tempfile.mkdtemp()
model = make(0)
opt = hvd.DistributedOptimizer(
    tf.keras.optimizers.SGD(scaled_lr), backward_passes_per_step=1, average_aggregated_gradients=True
)
model.compile(loss="mse", optimizer=opt, metrics=["mae"])
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=2, verbose=0),
]
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint(os.path.join(folder, "checkpoint-{epoch}.keras")))
rows = slice(hvd.rank() * 16, (hvd.rank() + 1) * 16)
history = model.fit(
    x[rows],
    y[rows],
    batch_size=8,
    steps_per_epoch=2,
    callbacks=callbacks,
    epochs=3,
    shuffle=False,
    verbose=1 if hvd.rank() == 0 else 0,
)
saved = sorted(os.listdir(folder))
assert saved == (["checkpoint-%d.keras" % epoch for epoch in (1, 2, 3)] if hvd.rank() == 0 else [])
if hvd.rank() == 0:
    loaded = hvd.load_model(os.path.join(folder, saved[-1]))
    np.testing.assert_array_equal(loaded.get_weights()[0], model.get_weights()[0])
for name in saved:
    os.remove(os.path.join(folder, name))
os.rmdir(folder)

alone, losses = make(0), []
for epoch in range(3):
    total = 0.0
    for step in range(2):
        where = np.concatenate([np.arange(r * 16 + step * 8, r * 16 + step * 8 + 8) for r in range(hvd.size())])
        factor = 1 if epoch >= 2 else ((epoch + (step + 1) / 2) * (hvd.size() - 1) / 2 + 1) / hvd.size()
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(alone(x[where]) - y[where]))
        for variable, gradient in zip(alone.trainable_variables, tape.gradient(loss, alone.trainable_variables)):
            variable.assign_sub(scaled_lr * factor * gradient)
        total += float(loss) / 2
    losses.append(total)
for ours, theirs in zip(model.get_weights(), alone.get_weights()):
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
np.testing.assert_allclose(history.history["loss"], losses, rtol=1e-4)
everywhere = hvd.allgather(np.array([history.history["loss"], history.history["mae"]]))
everywhere = np.asarray(everywhere).reshape(hvd.size(), 2, 3)
for rank in range(hvd.size()):  # averaged metrics are those of all ranks
    np.testing.assert_allclose(everywhere[rank], everywhere[0], rtol=1e-6)
np.testing.assert_allclose(float(model.optimizer.learning_rate), scaled_lr, rtol=1e-6)
