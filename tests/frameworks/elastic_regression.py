# What the elastic fault tests train in each framework, and how their ranks report their progress.
# Touches farandole's NumPy layer and files in a scratch directory.
"""All ranks have the same data, so that the weights after a number of steps are known, whichever ranks were lost."""

from __future__ import annotations

import time
from typing import Any

import elastic_files
import numpy as np

import farandole

NP = 2
RATE, MOMENTUM = 0.001, 0.5
draw = np.random.default_rng(0)
X, Y = draw.standard_normal((8, 5)), draw.standard_normal((8, 2))
W = draw.standard_normal((5, 2))
SIZES: list[int] = []


def alone(steps: int) -> Any:
    """The weights after so many steps in one process."""
    weights, speed = W.copy(), np.zeros_like(W)
    for _ in range(steps):
        speed = MOMENTUM * speed - RATE * 2 * X.T @ (X @ weights - Y) / Y.size
        weights += speed
    return weights


def begin() -> None:
    """In a new world: who is there."""
    elastic_files.begin()
    SIZES.append(farandole.size())


def tell(step: int) -> None:
    """Where rank 0 is."""
    elastic_files.tell(step)
    if farandole.size() < NP:
        time.sleep(0.02)  # sleep: few steps until the other has come


def over(step: int) -> bool:
    """Tells where rank 0 is; whether the training may end, which all ranks agree on."""
    tell(step)
    return elastic_files.agreed(elastic_files.finishing())


def leave(steps: int, weights: Any, **more: Any) -> None:
    """Writes what this rank ends with, and leaves the job."""
    all_values = farandole.allgather_object((steps, weights.tobytes()))
    error = float(np.abs(weights - alone(steps)).max())
    elastic_files.leave(steps=steps, same=len(set(all_values)) == 1, error=error, sizes=SIZES, **more)
