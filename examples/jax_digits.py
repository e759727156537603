"""Trains a small network on scikit-learn's handwritten digits with JAX and optax, and saves it with --save.
Run: farandole run -np 2 python examples/jax_digits.py"""

import argparse

import farandole.jax as hvd
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--save", metavar="FILE", help="where the trained parameters go")
options = parser.parse_args()

hvd.init()
first = hvd.rank() == 0  # the process that prints and saves

digits = load_digits()
images, labels = digits.data / 16, digits.target
x, y = images[:1500][hvd.rank() :: hvd.size()], labels[:1500][hvd.rank() :: hvd.size()]


def layer(key, inputs, outputs):
    return {"w": jax.random.normal(key, (inputs, outputs)) * np.sqrt(2 / inputs), "b": jnp.zeros(outputs)}


keys = jax.random.split(jax.random.key(1))
params = [layer(keys[0], 64, 128), layer(keys[1], 128, 10)]
params = hvd.broadcast_parameters(params, root_rank=0)
optimizer = hvd.DistributedOptimizer(optax.sgd(0.05 * hvd.size(), momentum=0.9))
state = optimizer.init(params)


def scores(params, image):
    hidden, output = params
    return jax.nn.relu(image @ hidden["w"] + hidden["b"]) @ output["w"] + output["b"]


def loss_of(params, image, label):
    return optax.softmax_cross_entropy_with_integer_labels(scores(params, image), label).mean()


@jax.jit
def step(params, state, image, label):
    updates, state = optimizer.update(jax.grad(loss_of)(params, image, label), state)
    return optax.apply_updates(params, updates), state


draw = np.random.default_rng(1)
batch = 50  # images per process and step
for _ in range(options.epochs):
    order = draw.permutation(len(x))
    for start in range(0, len(x) - batch + 1, batch):
        chosen = order[start : start + batch]
        params, state = step(params, state, x[chosen], y[chosen])

right = (scores(params, images[1500:]).argmax(1) == labels[1500:]).mean()
if first:
    print(f"accuracy {right:.1%}", flush=True)
if first and options.save:
    np.savez(options.save, *jax.tree.leaves(params))
