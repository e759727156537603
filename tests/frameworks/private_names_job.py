# Runs a framework without one of its private names at a time, each in a fork of a process that has imported it.
# Touches the framework, from which it removes names, and the public names of farandole.
"""`python private_names_job.py FRAMEWORK` prints the warnings and the error for each name."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any


class Without:
    """Replaces an object of C++, whose attributes cannot be removed: it hides one of them."""

    def __init__(self, inner: Any, name: str) -> None:
        self._inner, self._name = inner, name

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            raise AttributeError(name)
        return getattr(self._inner, name)


class Removed:
    """Replaces an attribute of a class: without it, Python would find the attribute of a base class."""

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        raise AttributeError("removed")


def remove(path: str) -> None:
    """Removes the name, as if this release did not have it."""
    module, _, attributes = path.partition(":")
    *before, last = attributes.split(".")
    owner: Any = functools.reduce(getattr, before, importlib.import_module(module))
    if isinstance(owner, type):
        vars(owner).get("__annotations__", {}).pop(last, None)
        setattr(owner, last, Removed())
    else:
        try:
            delattr(owner, last)
        except (AttributeError, TypeError):
            holder: Any = functools.reduce(getattr, before[:-1], importlib.import_module(module))
            setattr(holder, before[-1], Without(owner, last))


def with_torch(path: str) -> None:
    """A training step by DDP and by DistributedOptimizer, with batch normalisation and a shared tensor."""
    import torch
    import torch.distributed as dist

    import farandole.torch as hvd
    import farandole.torch.distributed  # noqa: F401 (it registers the backend)

    def trains(model: Any, optimizer: Any) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            before = [param.detach().clone() for param in model.parameters()]
            optimizer.step()
            assert any(not torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))

    def model() -> Any:
        return torch.nn.Sequential(torch.nn.Linear(4, 4), hvd.SyncBatchNorm(4), torch.nn.Linear(4, 1))

    def sgd_of(module: Any) -> Any:
        return torch.optim.SGD(module.parameters(), lr=0.1)

    if path.endswith("_FR_SELF_RECORDING_BACKENDS"):  # releases without it have no such recorder
        sys.modules["torch.distributed.distributed_c10d"].__dict__["_maybe_attach_flight_recorder"] = print
    if path.endswith("._set_default_backend"):  # torch makes no group at all without it
        hvd.init()
    else:
        dist.init_process_group("farandole", store=dist.HashStore(), rank=0, world_size=1)
        shared = torch.ones(1 << 20)
        if not path.endswith("._share_fd_cpu_"):  # torch itself shares tensors by this name
            shared.share_memory_()
        dist.all_reduce(shared)
        assert (shared == 1).all()
        wrapped = torch.nn.parallel.DistributedDataParallel(model())
        trains(wrapped, sgd_of(wrapped))
        if path.endswith("._get_default_store"):
            raises(RuntimeError, "which new groups need", lambda: dist.new_group([0]))
        if any(path.endswith(name) for name in ("._register_backend", "._set_group_name", "._get_backend")):
            pairs_are_refused()
            hvd.init()  # pairs_are_refused() has ended torch's default group
    if path.endswith("_coalescing"):
        raises(RuntimeError, "cannot coalesce operations", lambda: coalesce_by(path))
    assert dist.is_backend_available("farandole")
    plain = model()
    trains(plain, hvd.DistributedOptimizer(sgd_of(plain)))
    if dist.is_initialized():
        dist.destroy_process_group()
    hvd.shutdown()


def coalesce_by(path: str) -> None:
    from farandole.bindings.private import torch_names

    torch_names.coalesce(None, None, begin=path.endswith("._start_coalescing"))


def pairs_are_refused() -> None:
    """For releases of torch in which our backend is a group in Python; other releases combine backends themselves."""
    import torch.distributed as dist

    if hasattr(dist, "BackendBase"):
        return
    dist.destroy_process_group()
    begin = functools.partial(dist.init_process_group, store=dist.HashStore(), rank=0, world_size=1)
    raises(RuntimeError, "use only the backend farandole", lambda: begin("cpu:farandole,cuda:gloo"))


def with_jax(path: str) -> None:
    """The binding can be imported, or its error says why not."""
    import farandole.jax  # noqa: F401


def with_ray(path: str) -> None:
    """What the trainers use of Ray, without a cluster."""
    from farandole.bindings.private import MISSING, ray_names

    class Reports:
        def __init__(self, original: Any) -> None:
            self.theirs = original

    missing = {name.partition("_kv_")[2] for name in MISSING}
    if "put" in missing:
        ray_names.store_value(b"key", b"value", b"space")
    if "get" in missing:
        assert ray_names.stored_value(b"key", b"space") is None
    if "del" in missing:
        ray_names.delete_value(b"key", b"space")
    if any(name.endswith("train_fn_utils") for name in MISSING):
        ray_names.wrap_reports(Reports)  # outside of a train function it would raise


def raises(kind: type[Exception], text: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except kind as error:
        assert text in str(error), (text, error)
    else:
        raise AssertionError(f"nothing was raised that says {text!r}")


@contextlib.contextmanager
def missing(owner: Any, name: str, message: str) -> Iterator[None]:
    """In its block the owner does not have this name. Checks that one warning names it and contains `message`."""
    held = vars(owner).get(name)
    if isinstance(owner, type):
        vars(owner).get("__annotations__", {}).pop(name, None)
        setattr(owner, name, Removed())
    else:
        delattr(owner, name)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield
    warned = [str(one.message) for one in seen if f"{name} is missing" in str(one.message)]
    assert len(warned) == 1 and message in warned[0], (name, [str(one.message) for one in seen])
    if isinstance(owner, type) and held is None:
        delattr(owner, name)
    else:
        setattr(owner, name, held)


def overridden(kind: Any) -> set[str]:
    """Private methods of the framework's that a class of ours has as well: it calls them, and they need a probe."""
    ours = [one for one in kind.__mro__ if one.__module__.startswith("farandole")]
    names = {name for one in ours for name in vars(one) if name.startswith("_") and not name.endswith("__")}
    original = [one for one in kind.__mro__ if one not in ours and one.__module__ not in ("abc", "builtins")]
    return {name for name in names if any(callable(vars(one).get(name)) for one in original)}


def without_names_of_lightning() -> None:
    """The private names of its classes, modules and objects. They are independent, so one process is enough."""
    import lightning.fabric
    import lightning.fabric.fabric
    import lightning.fabric.utilities.distributed
    import lightning.pytorch
    import torch
    from lightning.fabric.strategies import ParallelStrategy as FabricBase
    from lightning.pytorch.loops.fit_loop import _FitLoop
    from lightning.pytorch.strategies import ParallelStrategy

    from farandole.bindings.private import lightning_names
    from farandole.lightning import trees

    def again(call: Callable[[], Any]) -> Any:
        lightning_names.look_up_names.cache_clear()
        return call()

    for tree, base, kind in (
        ("lightning.pytorch", ParallelStrategy, "FarandoleStrategy"),
        ("lightning.fabric", FabricBase, "FabricStrategy"),
    ):
        with missing(base, "_configure_launcher", "cannot be made: ImportError"):
            make = functools.partial(trees.build, tree, kind)
            again(functools.partial(raises, ImportError, "_configure_launcher", make))
    silent: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer: Any = lightning.pytorch.Trainer(accelerator="cpu", **silent)
    loop = trainer.fit_loop

    with missing(type(trainer), "_teardown", "its loaders stay"):
        again(lambda: lightning_names.look_up_names("lightning.pytorch"))
        lightning_names.forget_fit(trainer)
    with missing(_FitLoop, "_should_accumulate", "ElasticCallback raises RuntimeError"):
        again(lambda: lightning_names.look_up_names("lightning.pytorch"))
        raises(RuntimeError, "_should_accumulate", lambda: lightning_names.check_trainer(trainer))
        raises(RuntimeError, "_should_accumulate", lambda: lightning_names.accumulates(loop))
    for owner, name, call in (
        (trainer, "_checkpoint_connector", lambda: lightning_names.checkpoint(trainer)),
        (loop, "_combined_loader_states_to_load", lambda: lightning_names.loader_states(loop)),
        (loop, "_combined_loader", lambda: lightning_names.loaders(loop)),
        (loop, "_data_fetcher", lambda: lightning_names.check_trainer(trainer)),
    ):
        with missing(owner, name, "ElasticCallback raises RuntimeError"):
            raises(RuntimeError, name, lambda: lightning_names.check_trainer(trainer))
            raises(RuntimeError, name, call)
    lightning_names.check_trainer(trainer)

    module = sys.modules["lightning.fabric.utilities.distributed"]
    with missing(module, "_set_num_threads_if_needed", "each uses all cores"):
        again(lambda: lightning_names.look_up_names("lightning.fabric"))
        lightning_names.share_cores("lightning.fabric", 2)
    module = sys.modules["lightning.fabric.fabric"]
    placeholder = functools.partial(print, module.__dict__["_do_nothing"])
    assert lightning_names.does_nothing("lightning.fabric", placeholder)
    assert not lightning_names.does_nothing("lightning.fabric", functools.partial(print, print))
    with missing(module, "_do_nothing", "use `fabric.launch(function)`"):
        again(lambda: lightning_names.look_up_names("lightning.fabric"))
        assert not lightning_names.does_nothing("lightning.fabric", placeholder)

    strategy: Any = trees.build("lightning.pytorch", "FarandoleStrategy")(parallel_devices=[torch.device("cpu")])
    with missing(strategy, "_layer_sync", "each rank normalises its own batches"):
        assert lightning_names.layer_sync(strategy) is None
    strategy = trees.build("lightning.fabric", "FabricStrategy")(parallel_devices=[torch.device("cpu")])
    with missing(strategy, "_backward_sync_control", "results are the same"):
        lightning_names.set_no_sync_control(strategy, object())
    lightning_names.go_on_with(object(), 3)
    for tree, kind in (("lightning.pytorch", "FarandoleStrategy"), ("lightning.fabric", "FabricStrategy")):
        made = trees.build(tree, kind)
        assert overridden(made) == {"_configure_launcher"}, f"private methods of Lightning's: {overridden(made)}"


def without_names_of_spark() -> None:
    """Runs without a cluster: Spark's objects are missing, or replaced by objects without some attribute."""
    import types

    import pyspark
    from pyspark.ml.param import Params

    from farandole.bindings.private import MISSING

    with missing(pyspark.SparkContext, "_active_spark_context", "makes a SparkSession of it first"):
        from farandole.bindings.private import spark_names
        from farandole.spark import session

        assert spark_names.active_context() is None
        raises(RuntimeError, "there is no Spark session", session.active)
    stage: Any = Params()
    with missing(Params, "_resetUid", "it gets a new one"):
        import farandole.spark.common.persistence  # noqa: F401

        spark_names.take_uid(stage, "uid")
    context = types.SimpleNamespace(_jsc=None)
    with missing(context, "_jsc", "a job that is too large waits for Spark"):
        assert spark_names.task_slots(types.SimpleNamespace(sparkContext=context)) is None
        assert spark_names.task_slots(types.SimpleNamespace(sparkContext=context)) is None
    files = types.SimpleNamespace(_strip_protocol=None)
    with missing(files, "_strip_protocol", "without what stands before ://"):
        assert spark_names.local_path(files, "s3://bucket/key") == "bucket/key"
    assert len(MISSING) == 4, MISSING


def without_names_of_tensorflow() -> None:
    """TensorFlow, and Keras 3 on it."""
    import keras
    import tensorflow as tf
    from keras.src.optimizers.base_optimizer import BaseOptimizer

    from farandole.bindings.private import tensorflow_names

    service = tf.data.experimental.service
    del service.DispatchServer.__del__  # it would be asked of an object that is no server
    with missing(service.DispatchServer, "_stop", "it ends with its process"):
        import farandole.tensorflow.data.compute_service  # noqa: F401

        tensorflow_names.stop_server(object.__new__(service.DispatchServer))
    layer = keras.layers.BatchNormalization
    with missing(layer, "_moments", "it cannot be made: NotImplementedError"):
        sys.modules.pop("farandole.tensorflow.sync_batch_norm", None)
        synchronized = importlib.import_module("farandole.tensorflow.sync_batch_norm").SyncBatchNormalization
        raises(NotImplementedError, "take an older Keras", synchronized)

    import farandole.keras as hvd

    assert overridden(type(hvd.DistributedOptimizer(keras.optimizers.SGD()))) == {"_clip_gradients"}
    gradient = [tf.ones(2)]
    weight = keras.Variable([1.0, 2.0])
    accumulating: Any = hvd.DistributedOptimizer(keras.optimizers.SGD(gradient_accumulation_steps=2))
    accumulating.build([weight])
    with missing(BaseOptimizer, "_clip_gradients", "raise RuntimeError"):
        made = functools.partial(hvd.DistributedOptimizer, keras.optimizers.SGD(), backward_passes_per_step=2)
        raises(RuntimeError, "train without gradient_accumulation_steps", made)
        raises(RuntimeError, "train without", lambda: accumulating.apply(gradient, [weight]))
    optimizer: Any = keras.optimizers.SGD(gradient_accumulation_steps=2)
    optimizer.build([weight])
    assert len(tensorflow_names.accumulated(optimizer)) == 1
    with missing(optimizer, "_accumulated_gradients", "they count as its state"):
        assert tensorflow_names.accumulated(optimizer) == []
    plain: Any = keras.optimizers.SGD()
    with missing(plain, "_trainable_variables", "give them to it"):
        tensorflow_names.check_variables(plain)
        raises(RuntimeError, "give them to apply()", lambda: tensorflow_names.trainable(plain.__getattribute__))


def without_names_of_mxnet() -> None:
    """Runs in the separate environment with MXNet."""
    import mxnet as mx

    later = mx.gluon.nn.Dense(2)
    later.initialize()
    with missing(mx.gluon.Parameter, "_init_impl", "call it after the first forward pass"):
        from farandole.bindings.private import mxnet_names

        raises(RuntimeError, "first values", lambda: mxnet_names.after_first_values(later.weight, print))
    array = mx.nd.zeros(2)
    with missing(mx.nd.NDArray, "_sync_copyfrom", "through a second array"):
        mxnet_names.fill(array, [1.0, 2.0], lambda values: 7.0)
    assert array.asnumpy().tolist() == [7.0, 7.0]
    os.environ["FARANDOLE_AUTOLOAD"] = "0"
    import farandole.mxnet as hvd

    raises(RuntimeError, "FARANDOLE_AUTOLOAD=0", lambda: hvd.broadcast_parameters({"weight": later.weight}))
    reload = functools.partial(importlib.reload, mxnet_names)
    with missing(mx.gluon.Trainer, "_allreduce_grads", "it cannot be made: RuntimeError"):
        raises(RuntimeError, "gradients would not be averaged", lambda: reload().begin_trainer(object(), 1.0))
    with missing(mx.base, "_LIB", "`import farandole.mxnet` raises ImportError"):
        raises(ImportError, "mxnet.base._LIB", lambda: reload().library())


TOGETHER: dict[str, Callable[[], None]] = {
    "lightning": without_names_of_lightning,
    "pyspark": without_names_of_spark,
    "tensorflow": without_names_of_tensorflow,
    "mxnet": without_names_of_mxnet,
}
CASES: dict[str, Callable[[str], None]] = {"torch": with_torch, "jax": with_jax, "ray": with_ray}


# Modules that the framework imports only when the cases use them. They are imported once, with all names.
LATE = {
    "torch": ("torch.distributed", "torch.nn.parallel", "torch._dynamo", "torch.distributed.tensor"),
    "jax": ("jax.extend.core", "jax.interpreters.mlir", "jax.interpreters.batching", "jax.numpy", "jax.ffi"),
}


def alone(run: Callable[[], Any]) -> Any:
    """What `run` gives, in a fork of this process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, json.dumps(run()).encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return json.loads(text) if code == 0 else {"code": code}


def names_of(framework: str) -> dict[str, str]:
    """The names that exist, and what happens without each."""
    importlib.import_module(f"farandole.bindings.private.{framework}_names")
    private = importlib.import_module("farandole.bindings.private")
    return {path: name.without for path, name in private.FOUND.items()}


def without(framework: str, path: str) -> dict[str, Any]:
    """What the case says when this name is missing."""
    remove(path)
    raised = ""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            CASES[framework](path)
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
    return {"raised": raised, "warned": [str(one.message) for one in seen if f"{path} is missing" in str(one.message)]}


if __name__ == "__main__":
    chosen = sys.argv[1]
    importlib.import_module(chosen)
    if chosen in TOGETHER:
        TOGETHER[chosen]()
        sys.exit()
    for module in LATE.get(chosen, ()):
        importlib.import_module(module)
    table = alone(functools.partial(names_of, chosen))
    print(json.dumps({path: [table[path], alone(functools.partial(without, chosen, path))] for path in table}))
