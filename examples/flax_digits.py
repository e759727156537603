"""Trains a small network on scikit-learn's handwritten digits with Flax, and saves it with --save.
Run: farandole run -np 2 python examples/flax_digits.py"""

import argparse

import farandole.jax as hvd
import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--save", metavar="FILE", help="where the trained parameters go")
options = parser.parse_args()
batch = 50  # images per process and step

hvd.init()
first = hvd.rank() == 0  # the process that prints and saves

digits = load_digits()
images, labels = digits.images[..., None].astype("float32") / 16, digits.target
x, y = images[:1500][hvd.rank() :: hvd.size()], labels[:1500][hvd.rank() :: hvd.size()]


class Network(nnx.Module):
    def __init__(self, rngs):
        self.convolution = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.hidden = nnx.Linear(4 * 4 * 16, 64, rngs=rngs)
        self.output = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, image):
        image = nnx.max_pool(nnx.relu(self.convolution(image)), (2, 2), (2, 2))
        return self.output(nnx.relu(self.hidden(image.reshape(len(image), -1))))


model = Network(nnx.Rngs(1))
nnx.update(model, hvd.broadcast_parameters(nnx.state(model), root_rank=0))
rule = hvd.DistributedOptimizer(optax.sgd(0.05 * hvd.size(), momentum=0.9))
optimizer = nnx.Optimizer(model, rule, wrt=nnx.Param)


def loss_of(model, image, label):
    return optax.softmax_cross_entropy_with_integer_labels(model(image), label).mean()


@nnx.jit
def step(model, optimizer, image, label):
    optimizer.update(model, nnx.grad(loss_of)(model, image, label))


draw = np.random.default_rng(1)
for _ in range(options.epochs):
    order = draw.permutation(len(x))
    for start in range(0, len(x) - batch + 1, batch):
        chosen = order[start : start + batch]
        step(model, optimizer, x[chosen], y[chosen])

right = (model(images[1500:]).argmax(1) == labels[1500:]).mean()
if first:
    print(f"accuracy {right:.1%}", flush=True)
if first and options.save:
    np.savez(options.save, *jax.tree.leaves(nnx.state(model, nnx.Param)))
