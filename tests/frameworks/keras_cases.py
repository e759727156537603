# Training with Keras on several ranks, on the backend that KERAS_BACKEND names; run as a program it is one rank.
# Touches Keras, farandole.keras or farandole.tensorflow.keras, and the battery.
"""`model.fit` on shards gives what one process gives on the whole batch; callbacks; files that load without us."""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np
from battery.binding import Binding, Table, fails
from battery.run import run

from farandole.elastic import commits, describe_memory

BACKEND = os.environ["KERAS_BACKEND"]
LEGACY = os.environ.get("TF_USE_LEGACY_KERAS") == "1"
keras: Any
hvd: Any
if LEGACY:
    import tensorflow as tf

    import farandole.tensorflow.keras as hvd

    keras = tf.keras
else:
    import keras  # type: ignore[no-redef]

    import farandole.keras as hvd

KERAS = Table()
case = KERAS.case
EPOCHS = 5
PATIENCE_S = 240.0  # for one case: Keras traces every model again, and torch compiles its steps

draw = np.random.default_rng(0)
X, Y = draw.standard_normal((24, 5)), draw.standard_normal((24, 2))
W, B = draw.standard_normal((5, 2)), np.zeros(2)
RELOAD = """
import sys, numpy, {module} as keras
assert not any(name.startswith("farandole") for name in sys.modules)
model = keras.models.load_model(sys.argv[1])
print(float(numpy.abs(model.get_weights()[0]).sum()), type(model.optimizer).__name__)
"""


class KerasBinding(Binding):
    """The runner's probe; the cases need no more."""

    hvd = hvd

    def tensor(self, values: Any, dtype: Any = None) -> Any:
        return np.asarray(values)

    def array(self, tensor: Any) -> Any:
        return tensor


class Halved:
    """A compressor of a user, which never doubles what it has halved; it works on tensors of the backend."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        assert not isinstance(tensor, np.ndarray)
        return tensor / 2, "ctx"

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        assert not isinstance(tensor, np.ndarray) and ctx == "ctx"
        return tensor


class Exact(keras.layers.Dense):  # type: ignore[misc]
    """For torch, where Keras's own matmul and mean are float32's, whatever the type of their tensors."""

    def call(self, inputs: Any, training: Any = None) -> Any:
        return inputs.matmul(self.kernel.value) + self.bias.value


def squared(wanted: Any, found: Any) -> Any:
    """The mean squared error of each example."""
    return ((wanted - found) ** 2).mean(-1)


def model_of(rank: int, name: str = "sgd", wrap: Any = lambda optimizer: optimizer, **more: Any) -> Any:
    keras.backend.set_floatx("float64")
    keras.utils.set_random_seed(1 + rank)
    exact, apart = not more.pop("plain", False) and BACKEND == "torch", more.pop("apart", False)
    model = keras.Sequential([keras.layers.Input((5,)), (Exact if exact else keras.layers.Dense)(2)])
    if rank == 0 or not apart:
        model.set_weights([W, B])
    optimizers = {"sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9), "adam": lambda: keras.optimizers.Adam(0.1)}
    loss = squared if exact else "mse"
    model.compile(optimizer=wrap(optimizers[name]()), loss=loss, metrics=["mae"], **more)
    return model


def fitted(model: Any, x: Any, y: Any, callbacks: Any = (), epochs: int = EPOCHS) -> Any:
    return model.fit(x, y, batch_size=len(x), epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))


def flat(model: Any) -> Any:
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


def agree(found: Any, wanted: Any) -> None:
    assert np.abs(found - wanted).max() < 1e-9, np.abs(found - wanted).max()
    all_values = hvd.allgather_object(found.tobytes())
    assert len(set(all_values)) == 1, "the ranks' bits differ"


@case()
def fitting_on_shards(b: Any, rank: int, size: int) -> None:
    for name in ("sgd", "adam"):
        single = model_of(0, name)
        history = fitted(single, X, Y).history
        for more in ({}, {"backward_passes_per_step": 2, "average_aggregated_gradients": True}):
            passes = more.get("backward_passes_per_step", 1)
            model = model_of(rank, name, lambda one: hvd.DistributedOptimizer(one, **more))  # noqa: B023
            assert type(model.optimizer).__name__ == type(single.optimizer).__name__
            callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
            found = fitted(model, X[rank::size], Y[rank::size], callbacks, EPOCHS * passes).history
            agree(flat(model), flat(single))
            if passes == 1:
                assert np.allclose(found["loss"], history["loss"]) and np.allclose(found["mae"], history["mae"])


@case()
def a_compiled_step_is_asked_for(b: Any, rank: int, size: int) -> None:
    if compiler := os.environ.get("TORCH_COMPILER"):  # torch's own takes half a minute
        torch: Any = importlib.import_module("torch")
        torch.compile = functools.partial(torch.compile, backend=compiler)
    single = model_of(0)
    fitted(single, X, Y)
    for wanted in (True, False):
        model = model_of(rank, "sgd", hvd.DistributedOptimizer, jit_compile=wanted)
        fitted(model, X[rank::size], Y[rank::size], [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
        agree(flat(model), flat(single))


@case()
def variables_are_the_roots_after_the_first_batch(b: Any, rank: int, size: int) -> None:
    model = model_of(rank, "adam", hvd.DistributedOptimizer, apart=True)
    calls: list[int] = []

    class Counted(hvd.callbacks.BroadcastGlobalVariablesCallback):  # type: ignore[misc]
        def on_batch_end(self, batch: int, logs: Any = None) -> None:
            calls.append(len(set(hvd.allgather_object(flat(self.model).tobytes()))))
            super().on_batch_end(batch, logs)
            calls.append(len(set(hvd.allgather_object(flat(self.model).tobytes()))))

    fitted(model, X[rank::size], Y[rank::size], [Counted(1)], 2)
    assert calls == [size, 1, 1, 1], calls


@case()
def others_wrap_the_hooks(b: Any, rank: int, size: int) -> None:
    """As libraries with layers of which each rank has a part do: ranks have other numbers of variables."""
    keras.backend.set_floatx("float64")
    keras.utils.set_random_seed(1 + rank)
    common = keras.layers.Dense(2)
    parts = [keras.layers.Dense(2, use_bias=False) for _ in range(1 + rank)]
    model = keras.Sequential([keras.layers.Input((5,)), common, *parts])
    own_variables = [variable for part in parts for variable in part.trainable_variables]
    noted: list[str] = []

    class Wrapped(hvd.callbacks.BroadcastGlobalVariablesCallback):  # type: ignore[misc]
        def on_batch_end(self, batch: int, logs: Any = None) -> None:
            slots = optimizer.momentums[2:] if LEGACY else []  # tf_keras makes them, with momentum or without
            for variable in (*own_variables, *slots) if not self.broadcast_done else ():
                self.register_local_var(variable)
            super().on_batch_end(batch, logs)

    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    reduce, reduce_grads = optimizer._allreduce, optimizer._allreduce_grads

    def registering(grads: Any, vars: Any) -> Any:
        noted.append("all")
        for variable in own_variables:
            optimizer.register_local_var(variable)
        return reduce(grads, vars)

    def counting(grads: Any, vars: Any) -> Any:
        noted.append(f"{len(grads)} of {len(vars)}")
        return reduce_grads(grads, vars)

    optimizer._allreduce, optimizer._allreduce_grads = registering, counting
    model.compile(optimizer=optimizer, loss="mse", run_eagerly=BACKEND != "jax")
    fitted(model, X[rank::size], Y[rank::size], [Wrapped(0)], 2)
    assert noted[:2] == ["all", "2 of 2"], noted
    rows = hvd.allgather_object([weight.tobytes() for weight in model.get_weights()])
    assert len({tuple(row[:2]) for row in rows}) == 1 and len({row[2] for row in rows}) == size


@case()
def a_class_over_the_optimizer(b: Any, rank: int, size: int) -> None:
    """Methods of a subclass take the place of the hooks; the sums of several passes go through them too."""
    ways: list[dict[str, Any]] = [{}]
    if BACKEND != "jax":  # there Keras's own accumulation fails with 64-bit types
        ways.append({"backward_passes_per_step": 2})
    for more in ways:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **more)
        noted: list[int] = []

        class Noting(type(optimizer)):  # type: ignore[misc]
            def _allreduce(self, grads: Any, vars: Any) -> Any:
                noted.append(len(grads))  # noqa: B023
                return super()._allreduce(grads, vars)

        optimizer.__class__ = Noting
        variable = keras.Variable([0.0, 0.0]) if not LEGACY else tf.Variable([0.0, 0.0])
        convert = keras.ops.convert_to_tensor if not LEGACY else tf.constant
        for _ in range(2):
            optimizer.apply_gradients([(convert([1.0 + rank, 2.0], "float32"), variable)])
        assert noted and set(noted) == {1}, noted
        wanted = -2 * np.array([1 + (size - 1) / 2, 2])
        assert np.allclose(np.asarray(variable.numpy()), wanted), variable


@case()
def gradients_travel_smaller(b: Any, rank: int, size: int) -> None:
    single = model_of(0)
    fitted(single, X, Y)
    model = model_of(rank, "sgd", lambda one: hvd.DistributedOptimizer(one, compression=hvd.Compression.fp16))
    fitted(model, X[rank::size], Y[rank::size], [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert np.abs(flat(model) - flat(single)).max() < 0.05


@case()
def rates_rise_and_fall(b: Any, rank: int, size: int) -> None:
    model = model_of(rank, "sgd", hvd.DistributedOptimizer)
    rates: list[float] = []

    class Watch(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if BACKEND == "jax":
                self.model.jax_state_sync()  # Keras keeps a step's variables elsewhere
            rates.append(float(np.asarray(self.model.optimizer.learning_rate.numpy())))

    warm = hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1 * size, warmup_epochs=2, verbose=1)
    falls = hvd.callbacks.LearningRateScheduleCallback(0.1 * size, multiplier=lambda epoch: 0.5, start_epoch=2)
    model.fit(X[:12], Y[:12], batch_size=3, epochs=3, shuffle=False, verbose=0, callbacks=[warm, falls, Watch()])
    # The contract's formula, batch by batch: four of them per epoch.
    wanted = [0.1 * ((index + 1) / 4 * (size - 1) / 2 + 1) for index in range(8)] + [0.05 * size] * 4
    assert np.allclose(rates, wanted, atol=1e-6), rates
    fails((TypeError, ValueError), "", lambda: hvd.callbacks.LearningRateScheduleCallback(None, 1.0))


@case()
def files_load_without_this_package(b: Any, rank: int, size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        model = model_of(rank, "adam", hvd.DistributedOptimizer, plain=True)
        best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
        best.filepath = os.path.join(folder, "best.keras")
        fitted(model, X[rank::size], Y[rank::size], [hvd.callbacks.BroadcastGlobalVariablesCallback(0), best], 2)
        assert os.path.exists(best.filepath) is (rank == 0)
        model.save(path)
        command = [sys.executable, "-c", RELOAD.format(module="tf_keras" if LEGACY else "keras"), path]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("FARANDOLE")}
        environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # torch would import the package that is installed
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        total, kind = done.stdout.split()[-2:]
        assert abs(float(total) - np.abs(model.get_weights()[0]).sum()) < 1e-9 and kind == "Adam"
        again = hvd.load_model(path)
        one, two = (fitted(each, X[rank::size], Y[rank::size], (), 2) and flat(each) for each in (model, again))
        agree(one, two)  # the optimizer continues with its state, and reduces


@case()
def values(b: Any, rank: int, size: int) -> None:
    assert np.allclose(hvd.allreduce(np.array([rank]), op=hvd.Sum), size * (size - 1) / 2)
    assert np.allclose(hvd.allgather(np.array([rank])), np.arange(size))
    assert np.allclose(hvd.broadcast(np.array([rank]), 1), 1)
    assert np.allclose(hvd.reducescatter(np.arange(2.0 * size), op=hvd.Sum), size * np.arange(2 * rank, 2 * rank + 2))
    assert hvd.broadcast_object({"rank": rank}, 1) == {"rank": 1}
    assert hvd.allreduce(np.array([1.0 * rank])) == (size - 1) / 2
    assert hvd.allreduce(np.array([rank]), average=False) == size * (size - 1) / 2
    # 4097 needs 12 bits: 11 are there, and the neighbour below is even.
    for compression, sent in ((hvd.Compression.none, 4097.0), (hvd.Compression.fp16, 4096.0), (Halved, 2048.5)):
        found = hvd.allreduce(np.array([4097.0]), op=hvd.Max, compression=compression)
        assert found == sent and found.dtype == np.float64, (compression, found, found.dtype)
    assert hvd.allreduce(np.array([257.0], np.float32), compression=hvd.Compression.bf16) == 256
    assert hvd.allreduce(np.array([4097]), compression=hvd.Compression.fp16) == 4097
    fails(TypeError, "compression=16", lambda: hvd.allreduce(np.array([1.0]), compression=16))
    fails(ValueError, "op=Adasum", lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), op=hvd.Adasum))
    if not LEGACY:
        fails(ValueError, "optimizer is a int", lambda: hvd.DistributedOptimizer(1))
        fails(RuntimeError, "there are no global", lambda: hvd.broadcast_global_variables(0))


@case()
def some_layers_stay(b: Any, rank: int, size: int) -> None:
    if LEGACY:
        return
    keras.utils.set_random_seed(1)
    own_variables, common = keras.layers.Dense(2, use_bias=False), keras.layers.Dense(2, use_bias=False)
    model = keras.Sequential([keras.layers.Input((5,)), common, own_variables])
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=own_variables)
    model.compile(optimizer=optimizer, loss="mse")
    fitted(model, X[rank::size], Y[rank::size], (), 1)
    rows = hvd.allgather_object([weight.tobytes() for weight in model.get_weights()])
    assert len({row[0] for row in rows}) == 1 and len({row[1] for row in rows}) == size


@case()
def state_comes_back(b: Any, rank: int, size: int) -> None:
    model = model_of(rank, "adam", hvd.DistributedOptimizer)
    fitted(model, X[rank::size], Y[rank::size], [hvd.callbacks.BroadcastGlobalVariablesCallback(0)], 1)
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    state.sync()
    before = flat(model)
    callbacks = [
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=100),
    ]
    fitted(model, X[rank::size], Y[rank::size], callbacks, 2)
    assert state.epoch == 2 and commits(state) > 1
    after = flat(model)
    fitted(model, X[rank::size], Y[rank::size], (), 1)
    state.restore()
    assert np.array_equal(flat(model), after) and not np.array_equal(after, before)
    agree(flat(model), after)
    assert "MB" in describe_memory(state)


if __name__ == "__main__":
    run(KerasBinding(), Table({name: KERAS[name] for name in (sys.argv[1:] or KERAS)}), PATIENCE_S)
