# The program of each rank of `farandole demo`: a small network learns a function, and a ledger counts its samples.
# Touches the public interface of the package, and elastic/.
"""`python -m farandole.tools.demo_rank`. It reports progress as lines of JSON on standard output."""

from __future__ import annotations

import hashlib
import json
import os
import time
from typing import Any

import numpy as np

import farandole
from farandole.elastic.loop import run
from farandole.elastic.sampler import next_cursor, order, shares
from farandole.elastic.state import ObjectState, commits, describe_memory
from farandole.world.runtime import runtime

SAMPLES, BATCH, EPOCHS = 1300, 20, 14  # the last step of an epoch has fewer samples
STEP_SECONDS = 0.03  # slow enough for users to watch


def tell(**words: Any) -> None:
    """Prints one line for the launcher, with the time."""
    print(json.dumps({**words, "time": time.monotonic()}), flush=True)


def examples() -> tuple[Any, Any]:
    """The samples: points of a plane, and the values of a wave function there."""
    x = np.random.default_rng(1).uniform(-1, 1, size=(SAMPLES, 2))
    return x, np.sin(3 * x[:, :1]) * np.cos(2 * x[:, 1:])


def first_weights() -> dict[str, Any]:
    """The initial weights of a network with one hidden layer."""
    draw = np.random.default_rng(2)
    return {"in": draw.normal(size=(2, 32)), "bias": np.zeros(32), "out": draw.normal(size=(32, 1)) / 6}


def gradients(weights: dict[str, Any], x: Any, y: Any) -> tuple[dict[str, Any], float]:
    """The sum of the gradients over these samples, and the sum of the squared errors."""
    hidden = np.tanh(x @ weights["in"] + weights["bias"])
    error = hidden @ weights["out"] - y
    back = (error @ weights["out"].T) * (1 - hidden**2)
    return {"in": x.T @ back, "bias": back.sum(0), "out": hidden.T @ error}, float((error**2).sum())


def step(state: Any, x: Any, y: Any, samples: Any) -> None:
    """One step: each rank takes its share of the samples, and the sums over all ranks change the weights."""
    parts = shares(state.cursor, SAMPLES, farandole.size(), BATCH)
    share = parts[farandole.rank()]
    mine = samples[share.start : share.start + share.count]
    grads, loss = gradients(state.weights, x[mine], y[mine])
    counts = np.bincount(mine, minlength=SAMPLES).astype(np.int64)
    for name, grad in grads.items():
        grads[name] = farandole.allreduce(grad, op=farandole.Sum, name=name)
    counts = farandole.allreduce(counts, op=farandole.Sum, name="ledger")
    state.loss = float(farandole.allreduce(np.array([loss]), op=farandole.Sum, name="loss")[0]) / share.total
    for name, grad in grads.items():
        state.weights[name] -= 0.2 / share.total * grad
    state.ledger[state.epoch] += counts
    state.cursor = next_cursor(state.cursor, SAMPLES, farandole.size(), BATCH)
    state.step += 1


@run
def train(state: Any) -> None:
    """The training function. It is called again after each change of ranks."""
    x, y = examples()
    pids = farandole.allgather_object(os.getpid(), name="pids")
    if farandole.rank() == 0:
        begun = {"epoch": state.epoch, "step": state.step, "commit": commits(state), "pids": pids}
        tell(kind="begin", size=farandole.size(), generation=runtime.world.session.generation, **begun)
    while state.epoch < EPOCHS:
        samples = order(SAMPLES, 3, state.epoch)
        while state.cursor < SAMPLES:
            step(state, x, y, samples)
            time.sleep(STEP_SECONDS)
            state.commit()
        if farandole.rank() == 0:
            tell(kind="epoch", epoch=state.epoch, size=farandole.size(), loss=state.loss)
        state.epoch, state.cursor = state.epoch + 1, 0
        state.commit()


def main() -> None:
    """Trains, and reports the result."""
    farandole.init()
    state = ObjectState(
        farandole.broadcast_object,
        farandole.rank,
        weights=first_weights(),
        ledger=np.zeros((EPOCHS, SAMPLES), dtype=np.int64),
        epoch=0,
        cursor=0,
        step=0,
        loss=0.0,
    )
    train(state)
    weights = b"".join(state.weights[name].tobytes() for name in sorted(state.weights))
    tell(
        kind="end",
        rank=farandole.rank(),
        loss=state.loss,
        weights=hashlib.sha256(weights).hexdigest(),
        lost=int((state.ledger == 0).sum()),
        duplicated=int((state.ledger > 1).sum()),
        memory=describe_memory(state),
    )
    farandole.shutdown()


if __name__ == "__main__":
    main()
