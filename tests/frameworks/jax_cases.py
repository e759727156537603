# Training and transformations with JAX on several ranks, as cases for the battery's runner; as a program, one rank.
# Touches JAX, optax, farandole.jax and the battery.
"""Each way to train on shards gives what one process gives on the whole batch, with the same bits on all ranks."""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from battery.binding import Table, fails
from battery.run import run
from jax_binding import PATIENCE_S, EagerBinding

import farandole.jax as hvd
from farandole.base import errors
from farandole.base.errors import HostsUpdatedInterrupt
from farandole.elastic import load_from, memory, save_to

TRAINING = Table()
case = TRAINING.case
ORDER = Table()  # a separate job, because it takes long when other programs use the processors
STEPS = 5

draw = np.random.default_rng(0)
X, Y = draw.standard_normal((24, 5)), draw.standard_normal((24, 2))
START = {"w": draw.standard_normal((5, 2)), "b": np.zeros(2)}


def loss_on(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def optimizer() -> Any:
    return optax.sgd(0.125, momentum=0.875)


def train(params: Any, stepper: Any, value_and_grad: Any, x: Any, y: Any, steps: int, compiled: bool = True) -> Any:
    state = stepper.init(params)

    def step(params: Any, state: Any) -> tuple[Any, Any]:
        _, gradients = value_and_grad(loss_on)(params, x, y)
        updates, state = stepper.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    once = jax.jit(step, donate_argnums=(0, 1)) if compiled else step
    for _ in range(steps):
        params, state = once(params, state)
    return flat(params)


def flat(tree: Any) -> Any:
    return np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(tree)])


def alone() -> Any:
    """What one process gives on the whole batch."""
    return train(jax.tree.map(jnp.asarray, START), optimizer(), jax.value_and_grad, X, Y, STEPS)


def start_of_rank_0(rank: int) -> Any:
    """Rank 0's parameters, which the others do not have."""
    return hvd.broadcast_parameters(jax.tree.map(lambda leaf: jnp.asarray(leaf) + rank, START), root_rank=0)


def agree(found: Any, wanted: Any, tolerance: float = 1e-9) -> None:
    assert np.abs(found - wanted).max() < tolerance, np.abs(found - wanted).max()
    all_values = hvd.allgather_object(found.tobytes())
    assert len(set(all_values)) == 1, "the ranks' bits differ"


@case()
def optimizers_on_shards(b: Any, rank: int, size: int) -> None:
    wanted, x, y = alone(), X[rank::size], Y[rank::size]
    for compiled in (True, False):
        agree(
            train(
                start_of_rank_0(rank), hvd.DistributedOptimizer(optimizer()), jax.value_and_grad, x, y, STEPS, compiled
            ),
            wanted,
        )
    for more, tolerance in (
        ({"gradient_predivide_factor": 2.0}, 1e-9),
        ({"compression": hvd.Compression.fp16}, 0.05),
        ({"compression": hvd.Compression.bf16}, 0.2),
    ):
        stepper = hvd.DistributedOptimizer(optimizer(), **more)
        agree(train(start_of_rank_0(rank), stepper, jax.value_and_grad, x, y, STEPS), wanted, tolerance)
    passes = hvd.DistributedOptimizer(optimizer(), backward_passes_per_step=2, average_aggregated_gradients=True)
    agree(train(start_of_rank_0(rank), passes, jax.value_and_grad, x, y, 2 * STEPS), wanted)


@case()
def gradients_on_shards(b: Any, rank: int, size: int) -> None:
    wanted, x, y = alone(), X[rank::size], Y[rank::size]
    agree(train(start_of_rank_0(rank), optimizer(), hvd.value_and_grad, x, y, STEPS), wanted)
    found = hvd.grad(lambda p: (p * (rank + 1.0), p), has_aux=True)(jnp.ones(()))
    assert float(found[0]) == (size + 1) / 2 and float(found[1]) == 1.0


@case()
def a_whole_training_in_one_scan(b: Any, rank: int, size: int) -> None:
    stepper, x, y = hvd.DistributedOptimizer(optimizer()), X[rank::size], Y[rank::size]

    def step(carry: Any, _: Any) -> Any:
        params, state = carry
        updates, state = stepper.update(jax.grad(loss_on)(params, x, y), state, params)
        return (optax.apply_updates(params, updates), state), None

    params = start_of_rank_0(rank)
    (params, _), _ = jax.jit(lambda carry: jax.lax.scan(step, carry, length=STEPS))((params, stepper.init(params)))
    agree(flat(params), alone())


@case()
def transformations(b: Any, rank: int, size: int) -> None:
    total = size * (size + 1) / 2

    def gradient(function: Callable[[Any], Any], array: Any) -> Any:
        found = jax.jit(jax.grad(lambda one: jnp.sum((rank + 1.0) * function(one))))(array)
        assert np.array_equal(found, jax.grad(lambda one: jnp.sum((rank + 1.0) * function(one)))(array))
        return np.asarray(found)

    ones = jnp.ones((2 * size, 3))
    assert (gradient(lambda one: hvd.allreduce(one, op=hvd.Sum), ones) == total).all()
    assert np.allclose(gradient(hvd.allgather, ones), total / size)
    assert np.allclose(gradient(lambda one: hvd.broadcast(one, 1), ones), total / size * (rank == 1))
    assert np.allclose(gradient(lambda one: hvd.broadcast({"a": one}, 0)["a"], ones), total / size * (rank == 0))
    shares = np.repeat(np.arange(1.0, size + 1), 2)[:, None] * np.ones((1, 3))
    assert np.allclose(gradient(hvd.alltoall, ones), shares)
    assert np.allclose(gradient(lambda one: hvd.reducescatter(one, op=hvd.Sum), ones), size * shares)
    uneven = gradient(hvd.reducescatter, jnp.ones(2 * size + 1))
    assert np.allclose(uneven, np.repeat(np.arange(1.0, size + 1), [3] + [2] * (size - 1)))
    # Whole numbers have no gradient, and are sent together with arrays that have one.
    mixed = lambda one: hvd.allreduce({"f": one, "i": jnp.arange(3)}, op=hvd.Sum)["f"]  # noqa: E731
    assert (gradient(mixed, ones) == total).all()
    # vmap: as if each example had been sent separately.
    batch = jnp.arange(12.0 * size).reshape(3, 2 * size, 2) * (rank + 1)
    operations: list[Callable[[Any], Any]] = [hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter]
    operations.append(lambda one: hvd.broadcast(one, 1))
    for operation in operations:
        wanted = np.stack([np.asarray(operation(one)) for one in batch])
        assert np.array_equal(jax.vmap(operation)(batch), wanted)
        assert np.array_equal(jax.jit(jax.vmap(operation))(batch), wanted)
    fails(NotImplementedError, "Adasum", lambda: jax.vmap(lambda one: hvd.allreduce(one, op=hvd.Adasum))(batch))

    def body(carry: Any, one: Any) -> Any:
        carry = carry + hvd.allreduce(one * carry)
        return carry, carry

    alone = lambda xs: jax.lax.scan(lambda c, one: (c + one * c,) * 2, 1.0, xs)[0]  # noqa: E731
    ones = jnp.arange(4.0)
    assert np.allclose(jax.grad(lambda xs: jax.lax.scan(body, 1.0, xs)[0])(ones), jax.grad(alone)(ones))
    assert np.allclose(jax.grad(jax.checkpoint(lambda one: jnp.sin(hvd.allreduce(one)).sum()))(ones), np.cos(ones))


@case()
def shapes_that_xla_cannot_know(b: Any, rank: int, size: int) -> None:
    rows = jnp.ones(2 * size)
    fails(ValueError, "in a compiled function", lambda: jax.jit(lambda one: hvd.alltoall(one, [2] * size))(rows))
    fails(ValueError, "alltoall without splits", lambda: jax.jit(hvd.alltoall)(rows[1:]))

    def uneven() -> Any:
        try:
            return jax.block_until_ready(
                jax.jit(lambda one: hvd.allgather(one, name="uneven"))(rows[: 1 if rank else None])
            )
        except jax.errors.JaxRuntimeError as error:
            raise hvd.translated(error) or error from None

    fails((ValueError, RuntimeError), "", uneven)


@ORDER.case()
def collectives_in_any_order(b: Any, rank: int, size: int) -> None:
    """64 independent allreduces become ready in a different order on each rank, 200 times."""
    work = np.random.default_rng(rank).integers(1, 50, 64)

    @jax.jit
    def step(base: Any) -> Any:
        def slow(index: int) -> Any:
            return jax.lax.fori_loop(0, work[index], lambda _, v: v * 1.0, base + index * (rank + 1.0))

        return [hvd.allreduce(slow(index), op=hvd.Sum, name=f"any{index}") for index in range(64)]

    total = size * (size + 1) / 2
    for number in range(200):
        found = step(jnp.asarray(float(number)))  # the next begins while this one may still run
        if number % 50 == 0:
            assert [float(one) for one in found] == [number * size + index * total for index in range(64)]
    assert [float(one) for one in found] == [199 * size + index * total for index in range(64)]


@case()
def programs_that_overlap(b: Any, rank: int, size: int) -> None:
    """Programs that do not wait for each other keep their order, also with the operations between them."""
    one, two = jax.jit(lambda v: hvd.allreduce(v, op=hvd.Sum)), jax.jit(lambda v: hvd.allgather(v[None]))
    found = []
    for number in range(50):
        found += [one(jnp.asarray(1.0 * number)), two(jnp.asarray(number + rank))]
        found.append(hvd.allreduce(jnp.asarray(2.0 * number), op=hvd.Sum))
    for number in range(50):
        first, second, third = found[3 * number : 3 * number + 3]
        assert (float(first), float(third)) == (number * size, 2 * number * size)
        assert second.tolist() == [number + other for other in range(size)]


@case()
def trees_of_everything(b: Any, rank: int, size: int) -> None:
    tree = {
        "weights": (jnp.full((2, 3), float(rank)), jnp.full(3, rank, jnp.bfloat16)),
        "old key": jax.random.PRNGKey(rank),
        "key": jax.random.key(rank),
        "numpy": np.full(2, rank),
        "plain": [rank, f"rank {rank}", None],
        "complex": jnp.full(2, rank + 1j),
    }
    found = hvd.broadcast_parameters(tree, root_rank=1)
    structures: list[Any] = [jax.tree.structure(found), jax.tree.structure(tree)]
    assert structures[0] == structures[1]
    assert (flat(found["weights"]) == 1).all() and found["weights"][1].dtype == jnp.bfloat16
    assert np.array_equal(found["old key"], jax.random.PRNGKey(1)) and found["plain"] == [1, "rank 1", None]
    assert float(jax.random.normal(found["key"])) == float(jax.random.normal(jax.random.key(1)))
    assert isinstance(found["numpy"], np.ndarray) and (found["numpy"] == 1).all()
    assert found["complex"].tolist() == [1 + 1j] * 2
    mean = jax.jit(hvd.allreduce)({"a": jnp.full(2, rank), "b": [jnp.full((), float(rank)), None]})
    assert float(mean["b"][0]) == (size - 1) / 2 and mean["b"][1] is None
    assert hvd.allreduce({}) == {} and hvd.broadcast_parameters([]) == []


@case(init={"process_sets": "dynamic"})
def training_in_a_process_set(b: Any, rank: int, size: int) -> None:
    most = hvd.add_process_set(list(range(1, size)))
    gradient = jax.jit(hvd.grad(lambda one: one * (rank + 1.0), process_set=most))
    wanted = 1.0 if rank == 0 else np.mean([other + 1.0 for other in range(1, size)])
    assert np.allclose(gradient(jnp.ones(())), wanted)


@case()
def invalid_arguments(b: Any, rank: int, size: int) -> None:
    more: dict[str, Any] = {"op": hvd.Sum, "gradient_predivide_factor": 2.0}
    fails(ValueError, "gradient_predivide_factor", lambda: hvd.DistributedOptimizer(optimizer(), **more))
    fails(ValueError, "backward_passes", lambda: hvd.DistributedOptimizer(optimizer(), backward_passes_per_step=0))
    fails(ValueError, "optimizer is a int", lambda: hvd.DistributedOptimizer(1))
    fails(TypeError, "compression=", lambda: hvd.value_and_grad(loss_on, compression="fp16"))


def begin_again(state: Any) -> None:
    """Goes back to the last commit, in a new world. A disagreement of the ranks is raised instead."""
    state.restore()
    raise HostsUpdatedInterrupt(False)


@case()
def going_on_after_an_error(b: Any, rank: int, size: int) -> None:
    """The loop goes back to the last commit, in a new world, with functions that were compiled in the old one."""
    state = hvd.elastic.JaxState(params={"w": jnp.full(2, float(rank))}, key=jax.random.key(rank), batch=rank)
    step = jax.jit(lambda one: hvd.allreduce(one, op=hvd.Sum, name="elastic.step"))
    seen: list[float] = []

    @hvd.elastic.run
    def train(state: Any) -> float:
        seen.append(float(state.params["w"][0]))
        state.commit()
        total = float(step(jnp.ones(()))[()])
        if len(seen) == 1:
            state.params, state.batch = {"w": jnp.full(2, 9.0)}, 7
            begin_again(state)
        return total

    assert train(state) == size
    disagree = hvd.elastic.run(lambda state: jax.block_until_ready(step(jnp.ones(3 + rank))))
    fails(errors.Mismatch, "", lambda: disagree(state))
    assert seen == [0.0, 0.0] and state.batch == 0 and memory(state)["replicated"] >= 16
    assert float(jax.random.normal(state.key)) == float(jax.random.normal(jax.random.key(0)))
    with tempfile.TemporaryDirectory() as folder:
        shared_folder = hvd.broadcast_object(folder)
        save_to(state, shared_folder, wait=True)
        other = hvd.elastic.JaxState(params={"w": jnp.zeros(2)}, key=jax.random.key(5), batch=-1)
        load_from(other, shared_folder)
        assert rank != 0 or (other.batch, other.params["w"].tolist()) == (0, [0.0, 0.0])
        hvd.barrier()


@case()
def two_frameworks_in_one_process(b: Any, rank: int, size: int) -> None:
    import torch

    import farandole.torch as hvt

    results: list[Any] = []
    other_thread = threading.Thread(
        target=lambda: results.extend(hvt.allreduce(torch.ones(3), op=hvt.Sum, name="both").tolist() for _ in range(9))
    )
    other_thread.start()
    doubled = jax.jit(lambda one: hvd.allreduce(one, op=hvd.Sum, name="both"))
    found = [doubled(jnp.ones(3)).tolist() for _ in range(9)]
    other_thread.join()
    assert found == results == [[size] * 3] * 9
    # Without names, in another order on each rank.
    plain = threading.Thread(target=lambda: results.extend(hvt.allreduce(torch.ones(2), op=hvt.Sum) for _ in range(9)))
    if rank:
        plain.start()
    assert [hvd.allreduce(jnp.ones(4), op=hvd.Sum).tolist() for _ in range(9)] == [[size] * 4] * 9
    if not rank:
        plain.start()
    plain.join()
    assert all(one.tolist() == [size] * 2 for one in results[9:]) and len(results) == 18


if __name__ == "__main__":
    if sys.argv[1:] == ["order"]:
        run(EagerBinding(), ORDER, 2 * PATIENCE_S)
    else:
        run(EagerBinding(), TRAINING, PATIENCE_S)
