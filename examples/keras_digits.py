"""Trains a small network on scikit-learn's handwritten digits with Keras, and saves it with --save.
Run: farandole run -np 2 python examples/keras_digits.py"""

import argparse

import farandole.keras as hvd
import keras
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--save", metavar="FILE", help="where the trained model goes")
options = parser.parse_args()

keras.utils.set_random_seed(1)
hvd.init()
first = hvd.rank() == 0  # the process that prints and saves

digits = load_digits()
images, labels = digits.images[..., None] / 16, digits.target
x, y = images[:1500][hvd.rank() :: hvd.size()], labels[:1500][hvd.rank() :: hvd.size()]

layers = keras.layers
model = keras.Sequential(
    [
        layers.Input((8, 8, 1)),
        layers.Conv2D(32, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(2),
        layers.Flatten(),
        layers.Dense(128, activation="relu"),
        layers.Dense(10, activation="softmax"),
    ]
)
optimizer = keras.optimizers.SGD(0.05 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer)
model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
model.fit(x, y, batch_size=50, epochs=options.epochs, verbose=2 if first else 0, callbacks=callbacks)

_, right = model.evaluate(images[1500:], labels[1500:], verbose=0)
if first:
    print(f"accuracy {right:.1%}", flush=True)
if first and options.save:
    model.save(options.save)
