# Training with TensorFlow on several ranks, as cases for the battery's runner; run as a program it is one rank.
# Touches TensorFlow, farandole.tensorflow and the battery.
"""Each way to train on shards gives what one process gives on the whole batch, with the same bits on all ranks."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf
from battery.binding import Table, fails
from battery.run import run
from tensorflow_binding import PATIENCE_S, EagerBinding

import farandole.tensorflow as hvd
from farandole.base.errors import HostsUpdatedInterrupt
from farandole.bindings import compat
from farandole.elastic import memory

TRAINING = Table()
case = TRAINING.case
STEPS = 5
# The number of collectives in any order: compiled ones, and calls of Python, which take twenty times as long.
MANY_STEPS, SLOW_STEPS = 200, int(os.environ.get("SLOW_STEPS", "200"))
V1 = tf.compat.v1

draw = np.random.default_rng(0)
X, Y = draw.standard_normal((24, 5)), draw.standard_normal((24, 2))
W, B = draw.standard_normal((5, 2)), np.zeros(2)


def loss_on(x: Any, y: Any, weights: Any, bias: Any) -> Any:
    return tf.reduce_mean(tf.square(x @ weights + bias - y))


def optimizer() -> Any:
    tf.keras.backend.set_floatx("float64")
    return tf.keras.optimizers.SGD(0.125, momentum=0.875)


def alone(steps: int = STEPS) -> Any:
    """What one process gives on the whole batch."""
    weights, bias, stepper = tf.Variable(W), tf.Variable(B), optimizer()
    for _ in range(steps):
        with tf.GradientTape() as tape:
            loss = loss_on(X, Y, weights, bias)
        stepper.apply_gradients(zip(tape.gradient(loss, [weights, bias]), [weights, bias], strict=True))
    return flat(weights, bias)


def flat(*values: Any) -> Any:
    return np.concatenate([np.asarray(value).ravel() for value in values])


def agree(found: Any, wanted: Any, tolerance: float = 1e-9) -> None:
    assert np.abs(found - wanted).max() < tolerance, np.abs(found - wanted).max()
    all_values = hvd.allgather_object(found.tobytes())
    assert len(set(all_values)) == 1, "the ranks' bits differ"


def trained(rank: int, size: int, wrap: Callable[[Any], Any], stepper: Any, function: bool) -> Any:
    """The variables after some steps on this rank's shard; `wrap` is put around the tape."""
    weights, bias = tf.Variable(W + rank), tf.Variable(B - rank)
    hvd.broadcast_variables([weights, bias], root_rank=0)
    stepper.build([weights, bias])

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = loss_on(X[rank::size], Y[rank::size], weights, bias)
        gradients = wrap(tape).gradient(loss, [weights, bias])
        stepper.apply_gradients(zip(gradients, [weights, bias], strict=True))

    once = tf.function(step) if function else step
    for _ in range(STEPS):
        once()
    return flat(weights, bias)


@case()
def tapes_on_shards(b: Any, rank: int, size: int) -> None:
    wanted = alone()
    for function in (False, True):
        agree(trained(rank, size, hvd.DistributedGradientTape, optimizer(), function), wanted)
    for more in ({"groups": 1}, {"gradient_predivide_factor": 2.0}, {"sparse_as_dense": True}):
        agree(trained(rank, size, lambda t: hvd.DistributedGradientTape(t, **more), optimizer(), True), wanted)  # noqa: B023
    for compression, tolerance in ((hvd.Compression.fp16, 0.05), (hvd.Compression.bf16, 0.2)):
        found = trained(
            rank, size, lambda t: hvd.DistributedGradientTape(t, compression=compression), optimizer(), True  # noqa: B023
        )  # fmt: skip
        agree(found, wanted, tolerance)


@case()
def keras_optimizers_on_shards(b: Any, rank: int, size: int) -> None:
    wanted = alone()
    for function in (False, True):
        agree(trained(rank, size, lambda t: t, hvd.DistributedOptimizer(optimizer()), function), wanted)


@case()
def old_optimizers_in_sessions(b: Any, rank: int, size: int) -> None:
    wanted = alone()
    for passes in (1, 2):
        with tf.Graph().as_default():
            weights = V1.get_variable("W", initializer=W + rank, use_resource=True)
            bias = V1.get_variable("B", initializer=B - rank, use_resource=True)
            loss = loss_on(X[rank::size], Y[rank::size], weights, bias)
            stepper = hvd.DistributedOptimizer(
                V1.train.MomentumOptimizer(0.125, 0.875),
                backward_passes_per_step=passes,
                average_aggregated_gradients=True,
            )
            train = stepper.minimize(loss)
            with V1.train.MonitoredTrainingSession(hooks=[hvd.BroadcastGlobalVariablesHook(0)]) as session:
                for _ in range(STEPS * passes):
                    session.run(train)
                found = session.run([weights, bias])
        agree(flat(*found), wanted)


@case()
def global_variables(b: Any, rank: int, size: int) -> None:
    fails(RuntimeError, "broadcast_global_variables() works only in graphs", lambda: hvd.broadcast_global_variables(0))
    with tf.Graph().as_default(), V1.Session() as session:
        one = V1.get_variable("one", initializer=np.full(3, rank), use_resource=True)
        session.run(V1.global_variables_initializer())
        session.run(hvd.broadcast_global_variables(size - 1))
        assert session.run(one).tolist() == [size - 1] * 3
        found = session.run([hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op()])
        assert found == [rank, size, rank, size]
        assert session.run(hvd.process_set_included_op()) == 1
    assert hvd.broadcast_object_fn(1)(rank) == 1


@case()
def variables_in_place(b: Any, rank: int, size: int) -> None:
    variable = tf.Variable([float(rank)])
    assert hvd.broadcast_(variable, 1) is variable and variable.numpy() == [1.0]
    fails(TypeError, "name=1", lambda: hvd.broadcast_(variable, 1, name=1))  # type: ignore[arg-type]
    variable.assign([float(rank)])
    inside = tf.function(lambda: hvd.broadcast_([variable], size - 1, name="inside")[0] * 2)
    assert inside() == [2.0 * (size - 1)] and variable.numpy() == [size - 1]
    # In a graph with a session: of resources and of the variables from before them, of one and of several.
    with tf.Graph().as_default(), V1.Session() as session:
        several = [
            V1.get_variable(f"v{kind}", initializer=np.full(3, rank + 10 * kind), use_resource=bool(kind))
            for kind in range(2)
        ]
        one, two = hvd.broadcast_(several[0], 1), hvd.broadcast_(several, size - 1, name="several")
        session.run(V1.global_variables_initializer())
        assert session.run(several)[0].tolist() == [rank] * 3
        assert session.run(one).tolist() == session.run(several[0]).tolist() == [1] * 3
        session.run(several[0].assign(np.full(3, rank)))
        wanted = [[size - 1] * 3, [size + 9] * 3]
        assert [value.tolist() for value in session.run(two)] == wanted
        assert [value.tolist() for value in session.run(several)] == wanted


@case()
def adasum_in_sessions(b: Any, rank: int, size: int) -> None:
    with tf.Graph().as_default(), V1.Session() as session:
        weights = V1.get_variable("W", initializer=np.zeros(size), use_resource=True)
        loss = tf.reduce_sum(weights * np.eye(size)[rank])
        train = hvd.DistributedOptimizer(V1.train.GradientDescentOptimizer(0.5), op=hvd.Adasum).minimize(loss)
        session.run(V1.global_variables_initializer())
        session.run(train)
        # The steps of the ranks are orthogonal: Adasum adds them up.
        assert np.allclose(session.run(weights), -0.5)


@case()
def slices_of_embeddings(b: Any, rank: int, size: int) -> None:
    table = tf.Variable(np.ones((6, 2)))

    def gradient(**more: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [rank, 5]) * (rank + 1.0))
        return hvd.DistributedGradientTape(tape, **more).gradient(loss, table)

    wanted = np.zeros((6, 2))
    for other in range(size):
        wanted[other] += (other + 1) / size
        wanted[5] += (other + 1) / size
    for call in (gradient, tf.function(gradient)):
        found = call()
        assert isinstance(found, tf.IndexedSlices) and np.allclose(tf.convert_to_tensor(found), wanted)
        dense = call(sparse_as_dense=True)
        assert isinstance(dense, tf.Tensor) and np.allclose(dense, wanted)
    slices = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0]), tf.constant([6, 2]))
    for wrong in ({"op": hvd.Max}, {"op": hvd.Adasum}, {"prescale_factor": 2.0}):
        fails(NotImplementedError, "", lambda: hvd.allreduce(slices, **wrong))  # noqa: B023


@case()
def some_gradients_stay(b: Any, rank: int, size: int) -> None:
    one, two = tf.Variable(1.0), tf.Variable(1.0)
    for scale, own in ((True, (rank + 1) / size), (False, rank + 1)):
        with tf.GradientTape() as tape:
            loss = (one + two) * (rank + 1.0)
        tape = hvd.PartialDistributedGradientTape(tape, scale_local_gradients=scale)
        tape.register_local_source(two)
        found = tape.gradient(loss, [one, two])
        assert np.allclose(found, [(size + 1) / 2, own]), found


@case(init={"process_sets": "dynamic"})
def training_in_a_process_set(b: Any, rank: int, size: int) -> None:
    most = hvd.add_process_set(list(range(1, size)))
    variable = tf.Variable(1.0)

    @tf.function
    def gradient() -> Any:
        with tf.GradientTape() as tape:
            loss = variable * (rank + 1.0)
        return hvd.DistributedGradientTape(tape, process_set=most).gradient(loss, variable)

    wanted = 1.0 if rank == 0 else np.mean([other + 1.0 for other in range(1, size)])
    assert np.allclose(gradient(), wanted)


@case()
def invalid_arguments(b: Any, rank: int, size: int) -> None:
    tape = tf.GradientTape()
    fails(ValueError, "gradient_predivide_factor", lambda: hvd.DistributedGradientTape(
        tape, op=hvd.Sum, gradient_predivide_factor=2.0))  # fmt: skip
    fails(ValueError, "groups", lambda: hvd.DistributedGradientTape(tape, groups=-1))
    fails(ValueError, "op=Adasum", lambda: hvd.DistributedOptimizer(optimizer(), op=hvd.Adasum))
    fails(ValueError, "backward_passes", lambda: hvd.DistributedOptimizer(optimizer(), backward_passes_per_step=0))
    fails(ValueError, "optimizer is a int", lambda: hvd.DistributedOptimizer(1))
    fails(ValueError, "SyncBatchNormalization", lambda: hvd.SyncBatchNormalization(fused=True))


@case()
def normalisation_over_all_ranks(b: Any, rank: int, size: int) -> None:
    tf.keras.backend.set_floatx("float64")
    data = draw_for(0).standard_normal((6 * size, 3)) * 3 + 100
    # Batches of different sizes.
    ends = np.cumsum([0] + [3 + 6 * other // max(1, size - 1) for other in range(size)])
    ends[-1] = 6 * size
    own = tf.constant(data[ends[rank] : ends[rank + 1]])
    whole, layer = tf.keras.layers.BatchNormalization(), hvd.SyncBatchNormalization()
    weight = draw_for(1).standard_normal((6 * size, 3))

    def passed(one: Any, values: Any, factors: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(values)
            result = one(values, training=True)
            loss = tf.reduce_sum(result * factors)
        return result, tape.gradient(loss, values)

    wanted, wanted_gradient = passed(whole, tf.constant(data), weight)
    found, gradient = passed(layer, own, weight[ends[rank] : ends[rank + 1]])
    assert np.allclose(found, wanted[ends[rank] : ends[rank + 1]], atol=1e-9)
    assert np.allclose(gradient, wanted_gradient[ends[rank] : ends[rank + 1]], atol=1e-9)
    assert np.allclose(layer.moving_mean, whole.moving_mean) and np.allclose(
        layer.moving_variance, whole.moving_variance
    )


def draw_for(seed: int) -> Any:
    return np.random.default_rng(seed)


def any_order(
    rank: int, size: int, stepper: Callable[[Callable[[int], Any], list[int]], Callable[[], Any]], steps: int
) -> None:
    """64 collectives that know nothing of each other, in another order on each rank."""

    def node(place: int) -> Any:
        return hvd.allreduce(tf.constant(float(place * (rank + 1))), op=hvd.Sum, name=f"any{place}")

    local = list(range(64))
    random.Random(rank).shuffle(local)
    step = stepper(node, local)
    for _ in range(steps):
        for place, value in zip(local, step(), strict=True):
            assert float(value) == place * size * (size + 1) / 2, (place, value)


@case()
def eager_collectives_in_any_order(b: Any, rank: int, size: int) -> None:
    if hvd.compiled.library() is not None:  # once is enough: eager tensors have one way
        with ThreadPoolExecutor(64) as threads:  # who asks waits
            any_order(rank, size, lambda node, local: lambda: list(threads.map(node, local)), SLOW_STEPS)


@case()
def collectives_of_a_function_in_any_order(b: Any, rank: int, size: int) -> None:
    """On two threads of TensorFlow (see the end of this file)."""
    steps = MANY_STEPS if hvd.compiled.library() is not None else SLOW_STEPS
    any_order(rank, size, lambda node, local: tf.function(lambda: [node(one) for one in local], autograph=False), steps)


@case()
def collectives_of_a_session_in_any_order(b: Any, rank: int, size: int) -> None:
    def stepper(node: Callable[[int], Any], local: list[int]) -> Callable[[], Any]:
        nodes = [node(one) for one in local]
        return lambda: session.run(nodes)

    two = V1.ConfigProto(inter_op_parallelism_threads=2)
    with tf.Graph().as_default(), V1.Session(config=two) as session:
        any_order(rank, size, stepper, MANY_STEPS if hvd.compiled.library() is not None else SLOW_STEPS)


@case()
def barriers_inside_functions(b: Any, rank: int, size: int) -> None:
    @tf.function
    def step() -> Any:
        came = tf.timestamp()
        with tf.control_dependencies([came]):
            everybody = hvd.barrier()
        with tf.control_dependencies([everybody]):
            return came, tf.timestamp(), hvd.allreduce(tf.ones(2), op=hvd.Sum)

    for late in range(size):
        if rank == late:
            time.sleep(0.1)  # sleep: a rank that does not wait for this one has gone on by then
        came, went, result = step()
        times = hvd.allgather_object((float(came), float(went)))
        assert max(one for one, _ in times) <= min(other for _, other in times), times
        assert result.numpy().tolist() == [size] * 2


@case()
def ranks_join_inside_functions(b: Any, rank: int, size: int) -> None:
    @tf.function
    def epoch(x: Any, branch: Any) -> Any:
        sums = [hvd.allreduce(x, op=hvd.Sum, name=f"join{index}") for index in range(rank + 1)]
        last = hvd.join() if branch is None else tf.cond(branch, hvd.join, lambda: -1)
        return sums, last, hvd.allreduce(x, op=hvd.Sum, name="afterwards")

    for index in range(10):
        sums, last, afterwards = epoch(tf.ones(2), None if index % 2 else tf.constant(True))
        assert [float(one[0]) for one in sums] == [size - index for index in range(rank + 1)]
        assert last == size - 1 and afterwards.numpy().tolist() == [size] * 2


@case()
def chains_in_opposite_orders(b: Any, rank: int, size: int) -> None:
    """Each rank begins with another chain of collectives, each of which needs the one before it: no chain waits."""

    def chain(name: str) -> Any:
        value = tf.constant(1.0)
        for link in range(3):
            value = hvd.allreduce(value, op=hvd.Sum, name=f"{name}{link}")
        return value

    names = [f"chain{index}." for index in range(8)]
    names = names[rank:] + names[:rank]
    step = tf.function(lambda: [chain(name) for name in names], autograph=False)
    for _ in range(5):
        assert [float(value) for value in step()] == [size**3] * 8


def begin_again(state: Any) -> None:
    """Goes back to the last commit, in a new world. A disagreement of the ranks is raised instead."""
    state.restore()
    raise HostsUpdatedInterrupt(False)


@case()
def going_on_after_an_error_in_a_graph(b: Any, rank: int, size: int) -> None:
    """The loop goes back to the last commit, in a new world, with the functions that were traced in the old one."""
    variable = tf.Variable([float(rank)])
    state = hvd.elastic.TensorFlowState(variables=[variable], batch=0)
    step = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, name="elastic.step"))
    seen: list[float] = []

    @hvd.elastic.run
    def train(state: Any) -> float:
        seen.append(float(variable.numpy()[0]))
        total = float(step(tf.ones(1))[0])
        if len(seen) == 1:
            variable.assign([9.0])
            begin_again(state)
        return total

    assert train(state) == size
    assert seen == [0.0, 0.0] and state.variables[0] is variable


@case()
def state_of_a_session(b: Any, rank: int, size: int) -> None:
    """Variables of a graph: rank 0's at the start, those of the last commit after an error in a later run."""
    with tf.Graph().as_default(), V1.Session() as session:
        weights = V1.get_variable("weights", initializer=W + rank, use_resource=rank % 2 == 0)  # both kinds
        moved = weights.assign_add(hvd.allreduce(tf.ones_like(W), op=hvd.Sum, name="session.step"))
        session.run(V1.global_variables_initializer())
        state = hvd.elastic.TensorFlowState(session=session, batch=rank)
        begun = []

        @hvd.elastic.run
        def train(state: Any) -> None:
            begun.append((session.run(weights), state.batch))
            session.run(moved)
            if len(begun) == 1:
                state.batch = 1
                state.commit()
                session.run(moved)
                state.batch = 2
                begin_again(state)

        train(state)
        assert [batch for _, batch in begun] == [0, 1] and np.array_equal(begun[0][0], W), begun
        assert np.array_equal(begun[1][0], W + size), begun
        agree(session.run(weights).ravel(), (W + 2 * size).ravel())
        assert memory(state)["replicated"] >= W.nbytes


@case()
def state_of_a_keras_model(b: Any, rank: int, size: int) -> None:
    """As scripts for Horovod have it: the model and its optimizer, which a function of TensorFlow's trains."""
    stepper = optimizer()
    model = tf.keras.Sequential([tf.keras.layers.Input((5,)), tf.keras.layers.Dense(2)])
    model.set_weights([W + rank, B - rank])
    stepper.build(model.trainable_variables)
    state = hvd.elastic.TensorFlowKerasState(model, stepper, backend=tf.keras.backend, batch=0)
    begun = []

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(X[rank::size]) - Y[rank::size]))
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
        stepper.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @hvd.elastic.run
    def train(state: Any) -> None:
        begun.append((state.batch, int(stepper.iterations.numpy())))
        while state.batch < STEPS:
            step()
            state.batch += 1
            if state.batch == 2:
                state.commit()
            if state.batch == 4 and len(begun) == 1:
                begin_again(state)

    train(state)
    assert begun == [(0, 0), (2, 2)], begun  # the optimizer went back with the weights
    agree(flat(*model.get_weights()), alone())
    fails(ValueError, "the model has no variables", lambda: hvd.elastic.TensorFlowKerasState(tf.keras.Sequential()))


@case()
def two_frameworks_in_one_process(b: Any, rank: int, size: int) -> None:
    assert compat.extension_available("tensorflow")
    if not compat.extension_available("torch"):
        return
    import torch

    import farandole.torch as hvt

    results: list[Any] = []
    thread = threading.Thread(
        target=lambda: results.extend(hvt.allreduce(torch.ones(3), op=hvt.Sum, name="both").tolist() for _ in range(9))
    )
    thread.start()
    doubled = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, name="both"))
    found = [doubled(tf.ones(3)).numpy().tolist() for _ in range(9)]
    thread.join()
    assert found == results == [[size] * 3] * 9
    # Without names, in another order on each rank.
    plain = threading.Thread(target=lambda: results.extend(hvt.allreduce(torch.ones(2), op=hvt.Sum) for _ in range(9)))
    if rank:
        plain.start()
    assert [hvd.allreduce(tf.ones(4), op=hvd.Sum).numpy().tolist() for _ in range(9)] == [[size] * 4] * 9
    if not rank:
        plain.start()
    plain.join()
    assert all(one.tolist() == [size] * 2 for one in results[9:]) and len(results) == 18


if __name__ == "__main__":
    tf.config.threading.set_inter_op_parallelism_threads(2)
    run(EagerBinding(), Table({name: TRAINING[name] for name in (sys.argv[1:] or TRAINING)}), PATIENCE_S)
