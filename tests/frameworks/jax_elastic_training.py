# The program of JAX's elastic fault tests: a compiled step on shards of state, in which a rank may die.
# Touches farandole.jax as users see it; elastic_regression.py tells the tests how it goes.
"""One rank. Arguments: how it trains, and the ways (compiled or callback) of those who begin and of those who come.

A file named `die` with a process's number in it has that process killed inside a compiled step.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from elastic_files import SCRATCH, check_waiting, finishing
from elastic_regression import MOMENTUM, NP, RATE, W, X, Y, begin, leave, tell

import farandole.jax as hvd
from farandole.jax import compiled

STEPS = 3  # in one compiled call
ERRORS: list[str] = []


def loss_of(weights: Any) -> Any:
    return jnp.mean((X @ weights - Y) ** 2)


def way() -> str:
    """The first processes take the first way, those who come later the other."""
    for index in range(NP):
        try:
            os.close(os.open(SCRATCH / f"process.{index}", os.O_CREAT | os.O_EXCL))
            return sys.argv[2]
        except FileExistsError:
            continue
    return sys.argv[3]


def dying(step: Any) -> Any:
    """Called by XLA in the middle of each step."""
    try:
        if int((SCRATCH / "die").read_text() or 0) == os.getpid():
            os.kill(os.getpid(), signal.SIGKILL)
    except FileNotFoundError:
        pass
    return np.zeros_like(step)


def by_gradient() -> tuple[Any, Any, Any]:
    """The state of training, a step, and where its weights are."""

    def step(state: Any) -> Any:
        weights, speed = state
        speed = MOMENTUM * speed - RATE * hvd.grad(loss_of)(weights)
        return weights + speed, speed

    return (jnp.asarray(W), jnp.zeros_like(W)), step, lambda state: state[0]


def by_optimizer() -> tuple[Any, Any, Any]:
    """The same with optax."""
    optimizer = hvd.DistributedOptimizer(optax.sgd(RATE, momentum=MOMENTUM))

    def step(state: Any) -> Any:
        weights, inner = state
        updates, inner = optimizer.update(jax.grad(loss_of)(weights), inner, weights)
        return optax.apply_updates(weights, updates), inner

    return (jnp.asarray(W), optimizer.init(jnp.asarray(W))), step, lambda state: state[0]


def trained() -> tuple[int, Any]:
    first, step, weights_of = {"gradient": by_gradient, "optimizer": by_optimizer}[sys.argv[1]]()
    if hvd.rank() != 0:
        first = jax.tree.map(lambda leaf: leaf + 1, first)  # rank 0's count

    def several(state: Any, finish: Any) -> Any:
        def one(state: Any, _: Any) -> Any:
            nothing = jax.pure_callback(dying, jax.ShapeDtypeStruct((), np.float64), jnp.zeros(()))
            return step(jax.tree.map(lambda leaf: leaf + nothing.astype(leaf.dtype), state)), None

        return jax.lax.scan(one, state, length=STEPS)[0], hvd.allreduce(finish, op=hvd.Sum, name="finish")

    together = jax.jit(several, donate_argnums=0)
    state = hvd.elastic.JaxState(training=first, step=0)

    check_waiting()

    @hvd.elastic.run
    def train(state: Any) -> None:
        begin()
        finish = 0.0
        while not finish:
            tell(state.step)
            try:
                state.training, asked = together(state.training, float(finishing()))
                finish = float(asked)
            except jax.errors.JaxRuntimeError as error:
                ERRORS.append(type(hvd.translated(error)).__name__)
                raise
            state.step += STEPS
            if state.step % (2 * STEPS) == 0:
                state.commit()

    train(state)
    return state.step, np.asarray(weights_of(state.training))


def main() -> None:
    os.environ["FARANDOLE_JAX_OPS"] = way()
    hvd.init()
    steps, weights = trained()
    leave(steps, weights, compiled=compiled.ready(), errors=ERRORS)


if __name__ == "__main__":
    main()
