"""Trains a small network on scikit-learn's handwritten digits with NumPy alone, on any number of processes.
Touches nothing outside: the data comes with scikit-learn. `farandole run -np 2 python examples/digits.py`"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import farandole

HIDDEN = 1024  # wide on purpose: 1.1 million parameters, so that gradients are worth sending
TEST = 297  # of 1,797 images


class Network:
    """Two hidden layers with rectifiers and a softmax; gradients by hand."""

    def __init__(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        sizes = [64, HIDDEN, HIDDEN, 10]
        self.weights = [
            (draw.standard_normal((rows, columns)) * np.sqrt(2 / rows)).astype(np.float32)
            for rows, columns in itertools.pairwise(sizes)
        ]
        self.speeds = [np.zeros_like(weight) for weight in self.weights]

    def forward(self, images: np.ndarray) -> list[np.ndarray]:
        """What each layer gives; the last is one row of scores per image."""
        layers = [images]
        for weight in self.weights[:-1]:
            layers.append(np.maximum(layers[-1] @ weight, 0))
        return [*layers, layers[-1] @ self.weights[-1]]

    def gradients(self, images: np.ndarray, labels: np.ndarray) -> list[np.ndarray]:
        """Averages over this rank's batch, one per weight."""
        *layers, scores = self.forward(images)
        error = np.exp(scores - scores.max(axis=1, keepdims=True))
        error /= error.sum(axis=1, keepdims=True)
        error[np.arange(len(labels)), labels] -= 1
        error /= len(labels)
        found = []
        for layer, weight in zip(reversed(layers), reversed(self.weights), strict=True):
            found.append(layer.T @ error)
            error = (error @ weight.T) * (layer > 0)
        return found[::-1]

    def step(self, gradients: list[np.ndarray], rate: float) -> None:
        """Gradient descent with momentum."""
        for weight, speed, gradient in zip(self.weights, self.speeds, gradients, strict=True):
            speed *= 0.9
            speed -= rate * gradient
            weight += speed

    def accuracy(self, images: np.ndarray, labels: np.ndarray) -> float:
        """The share of images that it reads right."""
        return float((self.forward(images)[-1].argmax(axis=1) == labels).mean())


def average(gradients: list[np.ndarray]) -> list[np.ndarray]:
    """The one line that makes it distributed: every rank gets the mean of all ranks' gradients."""
    handles = [
        farandole.allreduce_async(gradient, op=farandole.Average, name=f"layer.{number}")
        for number, gradient in enumerate(gradients)
    ]
    return [farandole.synchronize(handle) for handle in handles]


def train(options: argparse.Namespace) -> dict[str, float]:
    """All epochs on this rank; accuracy and speed of the whole job."""
    digits = load_digits()
    order = np.random.default_rng(1).permutation(len(digits.data))
    images, labels = (digits.data[order] / 16).astype(np.float32), digits.target[order]
    test, images = (images[:TEST], labels[:TEST]), images[TEST:]
    labels = labels[TEST:]
    size, rank = farandole.size(), farandole.rank()
    network = Network(seed=2)  # the same on all ranks, so nothing has to be sent at the start
    share = options.batch * size
    steps, began, seconds = 0, 0.0, 0.0
    for epoch in range(options.epochs):
        shuffled = np.random.default_rng(epoch).permutation(len(images))
        for start in range(0, len(images) - share + 1, share):
            if epoch == 1 and start == 0:
                began = time.perf_counter()  # the first epoch warms up
            mine = shuffled[start + rank * options.batch : start + (rank + 1) * options.batch]
            gradients = average(network.gradients(images[mine], labels[mine]))
            # The rate grows with the batch, over the first steps as well.
            network.step(gradients, options.rate * size * min(1.0, (steps + 1) / 20))
            steps += 1
        if rank == 0 and (epoch + 1) % options.report == 0:
            print(f"  epoch {epoch + 1:2d} of {options.epochs}: accuracy {network.accuracy(*test):.1%}", flush=True)
    seconds = time.perf_counter() - began
    timed = steps - steps // options.epochs
    return {
        "ranks": size,
        "accuracy": network.accuracy(*test),
        "samples_per_s": timed * share / seconds,
        "step_ms": 1e3 * seconds / timed,
        "parameters": sum(weight.size for weight in network.weights),
    }


def main() -> None:
    """Reads the options, trains, and lets rank 0 report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=250, help="images per rank and step")
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--report", type=int, default=5, help="print the accuracy every so many epochs")
    parser.add_argument("--pin", action="store_true", help="one core per rank")
    parser.add_argument("--result", type=Path, help="rank 0 writes its numbers to this file")
    options = parser.parse_args()
    farandole.init()
    if options.pin:
        cores = sorted(os.sched_getaffinity(0))
        for thread in os.listdir("/proc/self/task"):  # the engine's as well
            os.sched_setaffinity(int(thread), {cores[farandole.local_rank() % len(cores)]})
    result = train(options)
    if farandole.rank() == 0:
        print(f"  {result['samples_per_s']:.0f} samples/s, {result['step_ms']:.1f} ms per step", flush=True)
        if options.result:
            options.result.write_text(json.dumps(result))
    farandole.shutdown()


if __name__ == "__main__":
    main()
