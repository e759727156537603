# The program of TensorFlow's elastic fault tests: a loop over variables, or model.fit with the elastic callbacks.
# Touches farandole.tensorflow as users see it, and files in a scratch directory.
"""All ranks have the same data, so that the weights after so many steps are known, whoever was lost on the way.

Rank 0 tells its progress in a file; a file named `finish` ends the training.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import farandole.tensorflow.keras as hvd
from farandole.runtime import runtime
from farandole.tensorflow import DistributedGradientTape, allreduce, compiled
from farandole.tensorflow.elastic import TensorFlowState

SCRATCH = Path(os.environ["SCRATCH"])
NP = 2
RATE, MOMENTUM = 0.001, 0.5
draw = np.random.default_rng(0)
X, Y = draw.standard_normal((8, 5)), draw.standard_normal((8, 2))
W = draw.standard_normal((5, 2))
PIDS: list[int] = []
SIZES: list[int] = []


def loss_of(weights: Any) -> Any:
    return tf.reduce_mean(tf.square(X @ weights - Y))


def alone(steps: int) -> Any:
    """The weights after so many steps in one process."""
    weights, speed = W.copy(), np.zeros_like(W)
    for _ in range(steps):
        speed = MOMENTUM * speed - RATE * 2 * X.T @ (X @ weights - Y) / Y.size
        weights += speed
    return weights


def begin() -> None:
    PIDS[:] = hvd.allgather_object(os.getpid(), name="pids")
    SIZES.append(hvd.size())


def over(step: int) -> bool:
    """Tells where rank 0 is; whether the training may end, which all ranks agree on."""
    if hvd.rank() == 0:
        words = {"step": step, "size": hvd.size(), "pids": PIDS, "time": time.monotonic()}
        words["generation"] = runtime.world.session.generation
        (SCRATCH / "progress.new").write_text(json.dumps(words))
        os.rename(SCRATCH / "progress.new", SCRATCH / "progress")
    if hvd.size() < NP:
        time.sleep(0.02)  # few steps until the other has come
    return bool(hvd.allreduce(np.array([int((SCRATCH / "finish").exists())]), "finish", op=hvd.Sum)[0])


def loop() -> tuple[int, Any]:
    """Variables of TensorFlow, and a step that is traced once for all worlds."""
    weights, speed = tf.Variable(W + hvd.rank()), tf.Variable(np.zeros_like(W))

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(weights)
        gradient = DistributedGradientTape(tape).gradient(loss, weights)
        speed.assign(MOMENTUM * speed - RATE * gradient)
        weights.assign_add(speed)

    state = TensorFlowState(variables=[weights, speed], step=0)
    if hvd.rank() == 0:
        weights.assign(W)

    @hvd.elastic.run
    def train(state: Any) -> None:
        begin()
        while not over(state.step):
            step()
            state.step += 1
            if state.step % 5 == 0:
                state.commit()

    state.save()
    train(state)
    return state.step, weights.numpy()


def fit() -> tuple[int, Any]:
    """model.fit with the callbacks that commit."""
    tf.keras.backend.set_floatx("float64")
    model = tf.keras.Sequential([tf.keras.layers.Input((5,)), tf.keras.layers.Dense(2, use_bias=False)])
    if hvd.rank() == 0:
        model.set_weights([W])
    model.compile(optimizer=hvd.DistributedOptimizer(tf.keras.optimizers.SGD(RATE, momentum=MOMENTUM)), loss="mse")
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)

    class Tell(tf.keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = over(int(self.model.optimizer.iterations.numpy()))

    @hvd.elastic.run
    def train(state: Any) -> None:
        begin()
        callbacks = [
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.CommitStateCallback(state, batches_per_commit=3),
            Tell(),
        ]
        copies = 4  # batches of an epoch
        model.fit(
            np.tile(X, (copies, 1)), np.tile(Y, (copies, 1)), batch_size=8, epochs=1_000_000, shuffle=False, verbose=0,
            callbacks=callbacks,
        )  # fmt: skip

    train(state)
    assert state.epoch > 0 and state.batch == 0
    return int(model.optimizer.iterations.numpy()), model.get_weights()[0]


def main() -> None:
    hvd.init()
    steps, weights = {"loop": loop, "fit": fit}[sys.argv[1]]()
    everyones = hvd.allgather_object((steps, weights.tobytes()))
    result = {
        "steps": steps,
        "same": len(set(everyones)) == 1,
        "error": float(np.abs(weights - alone(steps)).max()),
        "sizes": SIZES,
        "compiled": compiled.library() is not None,
        "sum": float(np.asarray(allreduce(tf.ones(1), op=hvd.Sum))[0]),
    }
    (SCRATCH / f"result.{hvd.rank()}").write_text(json.dumps(result))
    hvd.shutdown()


if __name__ == "__main__":
    main()
