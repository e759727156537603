# The program of TensorFlow's elastic fault tests: a loop over variables, or model.fit with the elastic callbacks.
# Touches farandole.tensorflow as users see it; elastic_regression.py tells the tests how it goes.
"""One rank; the first argument is the way it trains."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import tensorflow as tf
from elastic_files import check_waiting
from elastic_regression import MOMENTUM, RATE, W, X, Y, begin, leave, over

import farandole.tensorflow.keras as hvd
from farandole.tensorflow import DistributedGradientTape, allreduce, compiled
from farandole.tensorflow.elastic import TensorFlowState


def loss_of(weights: Any) -> Any:
    return tf.reduce_mean(tf.square(X @ weights - Y))


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

    check_waiting()

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

    class Tell(tf.keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = over(int(self.model.optimizer.iterations.numpy()))

    check_waiting()

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
    total = float(np.asarray(allreduce(tf.ones(1), op=hvd.Sum))[0])
    leave(steps, weights, compiled=compiled.library() is not None, sum=total)


if __name__ == "__main__":
    main()
