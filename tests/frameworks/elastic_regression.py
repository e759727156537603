# What the elastic fault tests of frameworks train, and how their ranks tell where they are; for each framework.
# Touches farandole's NumPy layer and files in a scratch directory.
"""All ranks have the same data, so that the weights after so many steps are known, whoever was lost on the way.

Rank 0 tells its progress in a file; a file named `finish` ends the training.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

import farandole
from farandole.world.runtime import runtime

SCRATCH = Path(os.environ["SCRATCH"])
NP = 2
RATE, MOMENTUM = 0.001, 0.5
draw = np.random.default_rng(0)
X, Y = draw.standard_normal((8, 5)), draw.standard_normal((8, 2))
W = draw.standard_normal((5, 2))
PIDS: list[int] = []
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
    PIDS[:] = farandole.allgather_object(os.getpid(), name="pids")
    SIZES.append(farandole.size())


def tell(step: int) -> None:
    """Where rank 0 is."""
    if farandole.rank() == 0:
        words = {"step": step, "size": farandole.size(), "pids": PIDS, "time": time.monotonic()}
        words["generation"] = runtime.world.session.generation
        (SCRATCH / "progress.new").write_text(json.dumps(words))
        os.rename(SCRATCH / "progress.new", SCRATCH / "progress")
    if farandole.size() < NP:
        time.sleep(0.02)  # sleep: few steps until the other has come


def finishing() -> bool:
    """Whether this rank has been asked to end."""
    return (SCRATCH / "finish").exists()


def over(step: int) -> bool:
    """Tells where rank 0 is; whether the training may end, which all ranks agree on."""
    tell(step)
    return bool(farandole.allreduce(np.array([int(finishing())]), name="finish", op=farandole.Sum)[0])


def leave(steps: int, weights: Any, **more: Any) -> None:
    """What this rank ends with, in a file."""
    everyones = farandole.allgather_object((steps, weights.tobytes()))
    result = {
        "steps": steps,
        "same": len(set(everyones)) == 1,
        "error": float(np.abs(weights - alone(steps)).max()),
        "sizes": SIZES,
        **more,
    }
    (SCRATCH / f"result.{farandole.rank()}").write_text(json.dumps(result))
