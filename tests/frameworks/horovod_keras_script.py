# A typical script of a Horovod user for Keras, on Keras 3: model.fit with the callbacks.
# Touches only the public names of horovod.keras.
"""Writes checkpoints and prints an accuracy; the data is made up."""

import keras
import numpy as np

import horovod
import horovod.keras as hvd

hvd.init()
draw = np.random.default_rng(1)
images = draw.standard_normal((512, 8)).astype(np.float32)
labels = (images @ draw.standard_normal((8, 3))).argmax(1)

mnist_model = keras.Sequential([keras.layers.Dense(32, activation="relu"), keras.layers.Dense(3, activation="softmax")])
scaled_lr = 0.01 * hvd.size()
opt = keras.optimizers.Adam(scaled_lr)
opt = hvd.DistributedOptimizer(opt)
mnist_model.compile(
    loss=keras.losses.SparseCategoricalCrossentropy(),
    optimizer=opt,
    metrics=["accuracy"],
)
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=3, verbose=1),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.keras"))
verbose = 1 if hvd.rank() == 0 else 0
history = mnist_model.fit(
    images[hvd.rank() :: hvd.size()], labels[hvd.rank() :: hvd.size()], callbacks=callbacks, epochs=30, verbose=verbose
)
if hvd.rank() == 0:
    print(f"\naccuracy {history.history['accuracy'][-1]:.3f} with horovod {horovod.__version__}")
