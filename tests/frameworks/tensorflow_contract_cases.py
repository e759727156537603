# What other people's programs expect of horovod.tensorflow, as cases for the battery's runner; run as a program it is
# one rank. Touches TensorFlow, farandole.tensorflow and the battery.
"""Errors are TensorFlow's, sparse tensors in groups, tapes and optimizers that libraries wrap."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from battery.binding import Table, fails
from battery.run import run
from tensorflow_binding import PATIENCE_S, EagerBinding

import farandole
import farandole.tensorflow as hvd
from farandole.elastic import ObjectState
from farandole.tensorflow import elastic

CONTRACT = Table()
case = CONTRACT.case
V1 = tf.compat.v1
errors = tf.errors


def in_each_mode(operation: Callable[[], Any]) -> list[Callable[[], Any]]:
    """The call in eager mode, in a function and in a session."""

    def session() -> Any:
        with tf.Graph().as_default(), V1.Session() as running:
            return running.run(operation())

    return [operation, tf.function(operation, autograph=False), session]


def check_allreduce(size: int) -> None:
    assert float(hvd.allreduce(tf.ones(()), op=hvd.Sum, name="probe")) == size


# --- errors ----------------------------------------------------------------------------------------------------------


def disagreements(rank: int, size: int) -> dict[str, Callable[[], Any]]:
    odd = rank == size - 1
    ones = np.ones(2 * size, np.float32)
    return {
        "shape": lambda: hvd.allreduce(tf.constant(ones[: 2 + odd]), name="t"),
        "dtype": lambda: hvd.allreduce(tf.constant(ones, tf.float64 if odd else tf.float32), name="t"),
        "root": lambda: hvd.broadcast(tf.constant(ones), int(odd), name="t"),
        "shape of a broadcast": lambda: hvd.broadcast(tf.constant(ones[: 2 + odd]), 0, name="t"),
        "op": lambda: hvd.allreduce(tf.constant(ones), op=hvd.Max if odd else hvd.Sum, name="t"),
        "rows": lambda: hvd.allgather(tf.ones((2, 3 + odd)), name="t"),
        "dtype of rows": lambda: hvd.allgather(tf.ones(2, tf.int32 if odd else tf.int64), name="t"),
        "alltoall": lambda: hvd.alltoall(tf.ones((size, 3 + odd)), name="t")[0],
        "reducescatter": lambda: hvd.reducescatter(tf.ones((size, 3 + odd)), name="t"),
        "group": lambda: hvd.grouped_allreduce([tf.ones(2), tf.ones(2 + odd)], name="t"),
    }


@case()
def disagreements_are_failed_preconditions(b: Any, rank: int, size: int) -> None:
    for what, operation in disagreements(rank, size).items():
        for way, call in enumerate(in_each_mode(operation)):
            try:
                call()
            except errors.FailedPreconditionError as error:
                assert "Mismatched" in error.message and error.error_code == errors.FAILED_PRECONDITION, error
                assert way > 0 or isinstance(error, hvd.HorovodInternalError | hvd.Mismatch), type(error)
            else:
                raise AssertionError(f"{what}: nothing was raised")
            check_allreduce(size)


@case()
def wrong_arguments_are_invalid(b: Any, rank: int, size: int) -> None:
    rows = tf.ones(2 * size)
    even = [2] * size
    for splits in (even[1:], [*even, 0], [3, *even[1:]], [-1, *even[1:]]):
        for call in in_each_mode(lambda: hvd.alltoall(tf.ones(2 * size), tf.constant(splits, tf.int32))[0]):  # noqa: B023
            fails(errors.InvalidArgumentError, "", call)
        fails(ValueError, "", lambda: hvd.alltoall(rows, tf.constant(splits, tf.int32)))  # noqa: B023
    for call in in_each_mode(lambda: hvd.alltoall(tf.ones(2 * size + 1))):
        fails(errors.InvalidArgumentError, "", call)
    fails(errors.InvalidArgumentError, "", lambda: hvd.alltoall(rows, tf.ones(size)))
    for root in (-1, size):
        for call in in_each_mode(lambda: hvd.broadcast(tf.ones(1), root)):  # noqa: B023
            fails(errors.InvalidArgumentError, "root_rank", call)
    for operation in (hvd.allgather, hvd.alltoall, hvd.reducescatter):
        for kind in (errors.FailedPreconditionError, errors.InvalidArgumentError, ValueError, hvd.HorovodInternalError):
            fails(kind, "", lambda: operation(tf.ones(())))  # noqa: B023
    fails(errors.InvalidArgumentError, "", lambda: hvd.allreduce(tf.constant(["text"])))
    fails(errors.InvalidArgumentError, "", lambda: hvd.allreduce(rows, process_set=hvd.ProcessSet([0])))
    fails(errors.AbortedError, "Reducescatter currently only", lambda: hvd.reducescatter(rows, op=hvd.Max))
    check_allreduce(size)


@case()
def errors_in_functions_keep_their_class(b: Any, rank: int, size: int) -> None:
    """AutoGraph replaces an error that is raised while it traces by a new one; process pools pickle errors."""

    @tf.function  # type: ignore[untyped-decorator]
    def wrong() -> Any:
        return hvd.broadcast(tf.ones(1), size)

    fails(errors.InvalidArgumentError, "", wrong)
    try:
        hvd.allreduce(tf.ones(2 + rank), name="t")
    except hvd.Mismatch as error:
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and str(again) == str(error)


@case()
def mismatches_are_not_tried_again(b: Any, rank: int, size: int) -> None:
    for way in range(3):
        calls: list[int] = []
        call = in_each_mode(lambda: hvd.allreduce(tf.ones(2 + rank), name="t"))[way]

        @elastic.run
        def train(state: Any) -> None:
            calls.append(1)  # noqa: B023
            call()  # noqa: B023

        fails(errors.FailedPreconditionError, "", lambda: train(ObjectState(hvd.broadcast_object, hvd.rank, step=0)))
        assert calls == [1]
        check_allreduce(size)


# --- sparse tensors in groups ----------------------------------------------------------------------------------------


@case()
def groups_take_slices(b: Any, rank: int, size: int) -> None:
    def sliced(shaped: bool) -> Any:
        values, indices = tf.fill((2, 3), 1.0 + rank), tf.constant([rank, size])
        return tf.IndexedSlices(values, indices, tf.constant([size + 1, 3]) if shaped else None)

    rows = np.repeat(1.0 + np.arange(size), 2)[:, None] * np.ones((1, 3))
    indices = [number for one in range(size) for number in (one, size)]
    for op, divisor in ((hvd.Sum, 1), (hvd.Average, size)):
        for shaped in (True, False):
            for places in ((0,), (0, 1), (1,), (0, 3), (2, 3)):
                given = [sliced(shaped) if index in places else tf.fill((index + 1,), rank + 1.0) for index in range(4)]
                for index, found in enumerate(hvd.grouped_allreduce(given, op=op)):
                    if index not in places:
                        b.holds(found, np.full(index + 1, size * (size + 1) / 2 / divisor))
                        continue
                    assert isinstance(found, tf.IndexedSlices) and (found.dense_shape is not None) is shaped
                    assert np.allclose(found.values, rows / divisor), found.values
                    assert found.indices.numpy().tolist() == indices
        alone = hvd.grouped_allreduce([sliced(False)], op=op, name="alone")
        assert np.allclose(alone[0].values, rows / divisor)
        inside = tf.function(lambda: hvd.grouped_allreduce([tf.ones(2), sliced(True)], op=op))()  # noqa: B023
        assert np.allclose(tf.convert_to_tensor(inside[1])[0], np.ones(3) / divisor)
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        fails(NotImplementedError, "", lambda: hvd.grouped_allreduce([tf.ones(2), sliced(True)], op=op))  # noqa: B023
    fails(NotImplementedError, "prescale", lambda: hvd.grouped_allreduce([sliced(True)], prescale_factor=2.0))
    check_allreduce(size)


# --- tapes and optimizers --------------------------------------------------------------------------------------------


@case()
def local_and_global_gradients(b: Any, rank: int, size: int) -> None:
    for scaled in (True, False):
        own, common, unused = (tf.Variable([1.0 * (index + 1)]) for index in range(3))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(own * common * (rank + 1.0))
        tape = hvd.DistributedGradientTape(tape, scale_local_gradients=scaled)
        tape.register_local_source(own)
        local, others = tape.get_local_and_global_gradients(loss, [own, common, unused], use_generic_names=True)
        assert local[0][0] is own and others[0][0] is common and others[1][0] is unused
        b.holds(local[0][1], [2.0 * (rank + 1) / (size if scaled else 1)])
        b.holds(others[0][1], [(size + 1) / 2])
        assert others[1][1] is None and len(local) == 1 and len(others) == 2
    with tf.GradientTape() as tape:
        doubled = 2.0 * own
    _, [(_, gradient)] = hvd.DistributedGradientTape(tape).get_local_and_global_gradients(doubled, own, tf.ones(1) * 3)
    b.holds(gradient, [6.0])


@case()
def adasum_after_several_passes(b: Any, rank: int, size: int) -> None:
    """Each rank makes several local steps. Adasum then combines the changes since the last synchronisation."""
    for compression, tolerance in ((hvd.Compression.none, 1e-6), (hvd.Compression.fp16, 2e-3)):
        for passes in (1, 2, 3):
            with tf.Graph().as_default():
                weights = V1.get_variable("W", initializer=np.array([1.0, 2.0, 3.0], np.float32), use_resource=True)
                rate = 0.5
                target = np.arange(3, dtype=np.float32) + rank
                loss = tf.reduce_sum(tf.square(weights - target)) / 2
                stepper = hvd.DistributedOptimizer(
                    V1.train.GradientDescentOptimizer(rate), op=hvd.Adasum, compression=compression,
                    backward_passes_per_step=passes,
                )  # fmt: skip
                train = stepper.minimize(loss)
                with V1.Session() as session:
                    session.run(V1.global_variables_initializer())
                    expected = start = np.array([1.0, 2.0, 3.0], np.float32)
                    for step in range(2 * passes):
                        session.run(train)
                        expected = expected - rate * (expected - target)
                        if (step + 1) % passes == 0:
                            # Other tests compare the operation itself with the specification.
                            change = farandole.allreduce(expected - start, op=hvd.Adasum, name=f"change.{step}")
                            expected = start + change
                        found = session.run(weights)
                        assert np.abs(found - expected).max() < tolerance, (passes, step, found, expected)
                        expected = found
                        if (step + 1) % passes == 0:
                            start = found
                            assert len(set(hvd.allgather_object(found.tobytes()))) == 1


@case()
def adasum_counts_the_steps(b: Any, rank: int, size: int) -> None:
    with tf.Graph().as_default():
        counter = V1.train.get_or_create_global_step()
        weights = V1.get_variable("W", initializer=np.ones(3, np.float32), use_resource=True)
        stepper = hvd.DistributedOptimizer(
            V1.train.MomentumOptimizer(0.1, 0.9), op=hvd.Adasum, backward_passes_per_step=2
        )
        train = stepper.minimize(tf.reduce_sum(weights * (1.0 + rank)), global_step=counter)
        with V1.Session() as session:
            session.run(V1.global_variables_initializer())
            for _ in range(4):
                session.run(train)
            assert session.run(counter) == 4
            assert stepper.get_slot_names() == ["momentum"]


if __name__ == "__main__":
    run(EagerBinding(), Table({name: CONTRACT[name] for name in (sys.argv[1:] or CONTRACT)}), PATIENCE_S)
