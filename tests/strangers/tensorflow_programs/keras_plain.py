"""horovod.keras with model.fit: a schedule of learning rates, metrics averaged, evaluation on every rank's share.
Ends with the weights of one process."""

import keras
import numpy as np

import horovod.keras as hvd

hvd.init()
x = np.random.RandomState(1).rand(12 * hvd.size(), 3).astype("float32")
y = (x @ np.array([[1.0], [2.0], [3.0]], "float32")).astype("float32")


def make():
    keras.utils.set_random_seed(5)
    return keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])


def share(rank):
    return slice(rank * 12, (rank + 1) * 12)


model = make()
initial_lr = 0.05
model.compile(
    loss=keras.losses.MeanSquaredError(), optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(initial_lr))
)
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateScheduleCallback(initial_lr=initial_lr, multiplier=1.0, start_epoch=0, end_epoch=2),
    hvd.callbacks.LearningRateScheduleCallback(initial_lr=initial_lr, multiplier=1e-1, start_epoch=2, end_epoch=4),
    hvd.callbacks.LearningRateScheduleCallback(initial_lr=initial_lr, multiplier=lambda epoch: 0.5, start_epoch=4),
]
model.fit(
    x[share(hvd.rank())], y[share(hvd.rank())], batch_size=12, epochs=5, shuffle=False, verbose=0, callbacks=callbacks
)
score = hvd.allreduce(model.evaluate(x[share(hvd.rank())], y[share(hvd.rank())], verbose=0), name="score")

kernel, bias = make().get_weights()
kernel, bias = kernel.astype("float64"), bias.astype("float64")
for epoch in range(5):
    lr = initial_lr * (1.0, 1.0, 1.0, 0.1, 0.5)[epoch]  # a constant is a factor per epoch
    error = x @ kernel + bias - y
    kernel, bias = kernel - lr * 2 * x.T @ error / len(x), bias - lr * 2 * error.mean(0)
np.testing.assert_allclose(model.get_weights()[0], kernel, rtol=1e-4)
np.testing.assert_allclose(model.get_weights()[1], bias, rtol=1e-4)
np.testing.assert_allclose(float(np.mean(score)), np.square(x @ kernel + bias - y).mean(), rtol=1e-3)
