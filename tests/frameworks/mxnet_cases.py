# What only MXNet has, as one rank of a job in MXNet's own environment: order, trainers, optimizers, deferred shapes.
# Touches MXNet, farandole.mxnet and the shape of the battery's results.
"""`python mxnet_cases.py CASE...`: a line of JSON per case says what was wrong, or nothing."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import farandole.mxnet as hvd

CASES: dict[str, Callable[[int, int], None]] = {}
STEPS, ROWS = 6, 12  # of training


def case(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
    CASES[function.__name__] = function
    return function


def raises(kind: type[BaseException], text: str, call: Callable[[], Any]) -> BaseException:
    try:
        call()
    except kind as error:
        assert text in str(error), f"{text!r} is not in {str(error)!r}"
        return error
    raise AssertionError(f"no {kind.__name__}")


def data() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(7)
    x = draw.standard_normal((STEPS, ROWS, 5))
    return x, np.tanh(x[..., :2] * 2 - x[..., 2:4])


def network(in_units: int = 5) -> Any:
    net = gluon.nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(gluon.nn.Dense(8, "tanh", in_units=in_units), gluon.nn.Dense(2, in_units=8 if in_units else 0))
    net.cast("float64")
    return net


def filled(net: Any, seed: int) -> Any:
    """Parameters that a rank draws for itself."""
    draw = np.random.default_rng(seed)
    net.initialize()
    for _, param in sorted(net.collect_params().items()):
        param.set_data(mx.nd.array(0.5 * draw.standard_normal(param.shape), dtype="float64"))
    return net


def values(net: Any) -> list[np.ndarray]:
    return [param.data().asnumpy() for _, param in sorted(net.collect_params().items())]


def train(net: Any, trainer: Any, share: slice, batch: int) -> list[np.ndarray]:
    x, y = data()
    for step in range(STEPS):
        with autograd.record():
            error = net(mx.nd.array(x[step][share], dtype="float64")) - mx.nd.array(y[step][share], dtype="float64")
            loss = (error**2).sum()
        loss.backward()
        trainer.step(batch)
    return values(net)


def equal_everywhere(found: list[np.ndarray]) -> None:
    flat = np.concatenate([value.reshape(-1) for value in found])
    for other in hvd.allgather_object(flat.tobytes()):
        assert other == flat.tobytes(), "parameters differ between ranks"


ADAM: dict[str, Any] = {"optimizer": "adam", "optimizer_params": {"learning_rate": 0.05}}


@case
def a_trainer_on_shards_is_one_on_all(rank: int, size: int) -> None:
    alone = filled(network(), 0)
    expected = train(alone, gluon.Trainer(alone.collect_params(), **ADAM, kvstore=None), slice(None), ROWS)
    share = slice(rank, None, size)
    count = ROWS // size
    for options in ({}, {"num_groups": 2}, {"gradient_predivide_factor": 2.0}, {"prefix": "other."}):
        net = filled(network(), rank)
        hvd.broadcast_parameters(net.collect_params(), root_rank=0)
        found = train(net, hvd.DistributedTrainer(net.collect_params(), **ADAM, **options), share, count)
        equal_everywhere(found)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)
    net = filled(network(), 0)
    trainer = hvd.DistributedTrainer(net.collect_params(), **ADAM, compression=hvd.Compression.fp16)
    found = train(net, trainer, share, count)
    equal_everywhere(found)
    assert any(not np.allclose(one, other, atol=1e-9) for one, other in zip(found, expected, strict=True))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=0.05)


@case
def an_optimizer_on_shards_is_one_on_all(rank: int, size: int) -> None:
    def fit(optimizer: Any, share: slice, several: bool) -> list[np.ndarray]:
        draw = np.random.default_rng(3)
        weights = [mx.nd.array(draw.standard_normal((5, 2)), dtype="float64") for _ in range(2)]
        states = [optimizer.create_state_multi_precision(i, weight) for i, weight in enumerate(weights)]
        x, y = data()
        for weight in weights:
            weight.attach_grad()
        for step in range(STEPS):
            with autograd.record():
                one, other = weights
                product = mx.nd.dot(mx.nd.array(x[step][share], dtype="float64"), one * other)
                loss = ((product - mx.nd.array(y[step][share], dtype="float64")) ** 2).sum()
            loss.backward()
            if several:
                optimizer.update_multi_precision([0, 1], weights, [weight.grad for weight in weights], states)
            else:
                for i, weight in enumerate(weights):
                    optimizer.update(i, weight, weight.grad, states[i])
        return [weight.asnumpy() for weight in weights]

    # MXNet rounds rescale_grad to float32, so that it has to be the same number in the end.
    expected = fit(mx.optimizer.SGD(learning_rate=0.1, momentum=0.9, rescale_grad=1 / ROWS), slice(None), False)
    for several, options in ((True, {}), (True, {"num_groups": 1}), (False, {"gradient_predivide_factor": 2.0})):
        inner = mx.optimizer.SGD(learning_rate=0.2, momentum=0.9, rescale_grad=size / ROWS)
        optimizer = hvd.DistributedOptimizer(inner, **options)
        optimizer.set_learning_rate(0.1)
        assert inner.learning_rate == optimizer.learning_rate == 0.1
        found = fit(optimizer, slice(rank, None, size), several)
        equal_everywhere(found)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net = filled(network(), 0)
        trainer = hvd.DistributedTrainer(net.collect_params(), hvd.DistributedOptimizer(mx.optimizer.SGD()))
    assert any("averages gradients itself" in str(warning.message) for warning in caught)
    assert trainer._scale == 1 / size


@case
def a_module_trains_alike(rank: int, size: int) -> None:
    x, y = data()

    def fit(optimizer: Any, share: slice) -> dict[str, np.ndarray]:
        label = mx.sym.Variable("label")
        line = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2, name="line")
        module = mx.mod.Module(mx.sym.LinearRegressionOutput(line, label), ("data",), ("label",))
        count = x[0][share].shape[0]
        module.bind([("data", (count, 5))], [("label", (count, 2))])
        module.init_params(mx.init.Constant(0.01 * (rank + 1)))
        arguments, others = module.get_params()
        hvd.broadcast_parameters(arguments)
        hvd.broadcast_parameters(others, prefix="aux.")
        module.set_params(arguments, others)
        module.init_optimizer(kvstore=None, optimizer=optimizer)
        for step in range(STEPS):
            batch = mx.io.DataBatch([mx.nd.array(x[step][share])], [mx.nd.array(y[step][share])])
            module.forward_backward(batch)
            module.update()
        return {name: array.asnumpy() for name, array in module.get_params()[0].items()}

    expected = fit(mx.optimizer.SGD(learning_rate=0.1, rescale_grad=1 / ROWS), slice(None))
    inner = mx.optimizer.SGD(learning_rate=0.1, rescale_grad=size / ROWS)
    found = fit(hvd.DistributedOptimizer(inner), slice(rank, None, size))
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5)


@case
def parameters_of_unknown_shape_are_broadcast_later(rank: int, size: int) -> None:
    mx.random.seed(rank + 1)
    net = network(in_units=0)
    net.initialize(mx.init.Uniform(1.0))
    hvd.broadcast_parameters(net.collect_params(), root_rank=size - 1)
    net(mx.nd.array(data()[0][0], dtype="float64"))
    found = values(net)
    assert any(np.any(value != 0) for value in found)
    equal_everywhere(found)
    net.initialize(mx.init.Uniform(1.0), force_reinit=True)  # once is once: now each rank has its own
    draws = hvd.allgather_object(values(net)[-1].tobytes())
    assert len(set(draws)) == size
    raises(ValueError, "expected block.collect_params()", lambda: hvd.broadcast_parameters([mx.nd.ones(2)]))
    raises(ValueError, "'a' is a float", lambda: hvd.broadcast_parameters({"a": 1.0}))
    raises(RuntimeError, "has not been initialized", lambda: hvd.broadcast_parameters(network().collect_params()))


@case
def what_is_done_to_an_array_stays_in_order(rank: int, size: int) -> None:
    """No wait in between: a collective sees what MXNet was told to do before, and MXNet sees its result."""
    total = size * (size + 1) // 2
    for count in (1, 300_000):
        array = mx.nd.zeros((count,), dtype="float64")
        side = mx.nd.ones((count,), dtype="float64")
        expected, side_expected = 0.0, 1.0
        for step in range(10):
            array += rank + 1  # differs between ranks until it is summed
            hvd.allreduce_(array, op=hvd.Sum, name=f"a{step}")
            array *= 0.5
            expected = (expected * size + total) * 0.5
            other = hvd.allreduce(array + rank, name=f"b{step}")
            side = side + other
            hvd.broadcast_(side, root_rank=step % size, name=f"c{step}")
            array += hvd.broadcast(array * 0 + rank, root_rank=size - 1, name=f"d{step}")
            side_expected += expected + (size - 1) / 2
            expected += size - 1
        np.testing.assert_allclose(array.asnumpy(), np.full(count, expected), rtol=1e-12)
        np.testing.assert_allclose(side.asnumpy(), np.full(count, side_expected), rtol=1e-12)
    whole = mx.nd.zeros((4, 3))
    rows = [whole[i] for i in range(4)]  # views of one array
    whole += rank
    hvd.grouped_allreduce_(rows[:2] + rows[1:3], op=hvd.Max, name="views")
    whole += 1
    np.testing.assert_array_equal(whole.asnumpy()[:, 0], [size, size, size, rank + 1])


@case
def convolutions_are_rows_again(rank: int, size: int) -> None:
    x, w = mx.nd.random.uniform(shape=(2, 16, 8, 8)), mx.nd.random.uniform(shape=(32, 16, 3, 3))
    hvd.broadcast_(x, 0, "x")
    hvd.broadcast_(w, 0, "w")

    def convolved() -> Any:
        return mx.nd.Convolution(x, w, no_bias=True, kernel=(3, 3), num_filter=32)

    expected = convolved().asnumpy() * size
    np.testing.assert_allclose(hvd.allreduce(convolved(), op=hvd.Sum).asnumpy(), expected, rtol=1e-5)
    np.testing.assert_allclose(hvd.allreduce_(convolved(), op=hvd.Sum).asnumpy(), expected, rtol=1e-5)
    assert hvd.allgather(convolved()).shape == (2 * size, 32, 6, 6)


@case
def a_failed_operation_is_raised_by_its_call(rank: int, size: int) -> None:
    error: Any = raises(
        hvd.Mismatch,
        "Mismatched ALLREDUCE tensor shapes",
        lambda: hvd.allreduce(mx.nd.ones((2 + rank,)), name="shapes"),
    )
    assert issubclass(type(error), hvd.HorovodInternalError) and "shapes" in error.name
    np.testing.assert_array_equal(hvd.allreduce(mx.nd.ones(2), op=hvd.Sum).asnumpy(), [size, size])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hvd.allreduce(mx.nd.ones(2), average=True)
    assert [(w.category, w.filename) for w in caught] == [(DeprecationWarning, __file__)]
    net = filled(network(), 0)
    raises(TypeError, "compression=", lambda: hvd.DistributedTrainer(net.collect_params(), "sgd", compression="fp16"))
    raises(ValueError, "num_groups=", lambda: hvd.DistributedOptimizer(mx.optimizer.SGD(), num_groups=-1))
    raises(TypeError, "expected one of mxnet.optimizer", lambda: hvd.DistributedOptimizer("sgd"))


@case
def join_stands_in_with_zeros(rank: int, size: int) -> None:
    array = mx.nd.ones((100_000,))
    for _ in range(rank + 1):
        array = mx.nd.dot(array.reshape((1, -1)), array.reshape((-1, 1))).reshape((1,)).broadcast_to((100_000,)) * 0 + 1
        hvd.allreduce_(array, op=hvd.Sum)
    assert hvd.join() in range(size)
    assert array.asnumpy()[0] == size - rank  # those who had left add zeros
    again = mx.nd.ones((3,))
    hvd.allreduce_(again, op=hvd.Sum)  # without a name, after another number of them on each rank
    assert again.asnumpy().tolist() == [size] * 3


@case
def leaving_and_coming_back(rank: int, size: int) -> None:
    array = mx.nd.ones((1000,))
    for step in range(20):
        hvd.allreduce_(array, op=hvd.Sum, name=f"last{step}", prescale_factor=1 / size)
    if rank == 0:
        hvd.shutdown()
    assert array.asnumpy()[0] == 1
    hvd.shutdown()
    hvd.init()
    np.testing.assert_array_equal(hvd.allreduce(mx.nd.ones(2), op=hvd.Sum).asnumpy(), [size, size])


def killed(rank: int, size: int) -> None:
    """Not among the others: the last rank dies in the middle, and each survivor prints what it saw."""
    array = mx.nd.ones((200_000,))
    seen: list[str] = []
    for step in range(10_000):
        if rank == size - 1 and step == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            hvd.allreduce_(array, name="gradient")
            array += 1
            if step % 10 == 9:
                array.wait_to_read()
        except hvd.HorovodInternalError as error:
            seen.append(type(error).__name__)
            break
    calls: list[Callable[[], Any]] = [lambda: hvd.allreduce(array), lambda: hvd.allgather(array)]
    for call in calls:
        try:
            call()
        except hvd.HorovodInternalError as error:
            seen.append(type(error).__name__)
    print(json.dumps({"case": "killed", "wrong": "", "seen": seen}), flush=True)


def main() -> int:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    if sys.argv[1:] == ["killed"]:
        killed(rank, size)
        return 0
    for name in sys.argv[1:] or CASES:
        wrong, began = "", time.monotonic()
        try:
            CASES[name](rank, size)
            hvd.barrier()
        except BaseException:
            wrong = traceback.format_exc()
        print(json.dumps({"case": name, "wrong": wrong, "seconds": round(time.monotonic() - began, 3)}), flush=True)
        if wrong:
            return 1
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
