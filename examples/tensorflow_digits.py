"""Trains a small network on scikit-learn's handwritten digits with TensorFlow, and saves it with --save.
Run: farandole run -np 2 python examples/tensorflow_digits.py"""

import argparse

import farandole.tensorflow as hvd
import tensorflow as tf
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--save", metavar="FILE", help="where the trained model goes")
options = parser.parse_args()

tf.keras.utils.set_random_seed(1)
hvd.init()
first = hvd.rank() == 0  # the process that prints and saves

digits = load_digits()
images, labels = digits.data / 16, digits.target
x, y = images[:1500][hvd.rank() :: hvd.size()], labels[:1500][hvd.rank() :: hvd.size()]

layers = tf.keras.layers
network = [layers.Input((64,)), layers.Dense(128, activation="relu"), layers.Dense(10, activation="softmax")]
model = tf.keras.Sequential(network)
optimizer = tf.optimizers.SGD(0.05 * hvd.size(), momentum=0.9)
hvd.broadcast_variables(model.variables, root_rank=0)
loss_of = tf.losses.SparseCategoricalCrossentropy()
batches = tf.data.Dataset.from_tensor_slices((x.astype("float32"), y)).shuffle(1500).batch(50, True)


@tf.function
def step(image, label):
    with tf.GradientTape() as tape:
        loss = loss_of(label, model(image, training=True))
    tape = hvd.DistributedGradientTape(tape)
    variables = model.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))


for _ in range(options.epochs):
    for image, label in batches:
        step(image, label)

right = tf.reduce_mean(tf.cast(tf.argmax(model(images[1500:]), 1) == labels[1500:], tf.float32))
if first:
    print(f"accuracy {right:.1%}", flush=True)
if first and options.save:
    model.save(options.save)
