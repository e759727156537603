"""Trains a small network on scikit-learn's handwritten digits with MXNet's Gluon, and saves it with --save.
Run: farandole run -np 2 python examples/mxnet_digits.py"""

import argparse

import farandole.mxnet as hvd
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--save", metavar="FILE", help="where the trained parameters go")
options = parser.parse_args()

mx.random.seed(1)
np.random.seed(1)  # Gluon shuffles with NumPy
hvd.init()
first = hvd.rank() == 0  # the process that prints and saves

digits = load_digits()
images, labels = digits.images[:, None].astype("float32") / 16, digits.target.astype("float32")
x, y = images[:1500][hvd.rank() :: hvd.size()], labels[:1500][hvd.rank() :: hvd.size()]

net = gluon.nn.HybridSequential()
net.add(gluon.nn.Conv2D(32, 3, padding=1, activation="relu"), gluon.nn.MaxPool2D(2), gluon.nn.Flatten())
net.add(gluon.nn.Dense(128, activation="relu"), gluon.nn.Dense(10))
net.initialize(mx.init.Xavier())
net.hybridize()
hvd.broadcast_parameters(net.collect_params(), root_rank=0)
settings = {"learning_rate": 0.05 * hvd.size(), "momentum": 0.9}
trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", settings)
loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
batch = 50  # images per process and step
batches = gluon.data.DataLoader(gluon.data.ArrayDataset(x, y), batch, shuffle=True, last_batch="discard")

for _ in range(options.epochs):
    for image, label in batches:
        with autograd.record():
            loss = loss_of(net(image), label)
        loss.backward()
        trainer.step(batch)

right = (net(mx.nd.array(images[1500:])).argmax(1) == mx.nd.array(labels[1500:])).mean().asscalar()
if first:
    print(f"accuracy {right:.1%}", flush=True)
if first and options.save:
    net.save_parameters(options.save)
