"""The parameters of Spark's estimators and their defaults against Horovod's, by name, with their accessors.
Makes the estimators' classes; starts no Spark."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")
pytest.importorskip("torch")

SHARED: dict[str, Any] = {
    **dict.fromkeys(
        ("num_proc", "store", "backend", "model", "optimizer", "loss", "loss_weights", "sample_weight_col")
    ),
    **dict.fromkeys(("feature_cols", "label_cols", "continuous_cols", "categorical_cols", "validation")),
    **dict.fromkeys(("gradient_compression", "val_batch_size", "random_seed", "shuffle_buffer_size", "run_id")),
    **dict.fromkeys(("train_steps_per_epoch", "validation_steps_per_epoch", "label_shapes", "mp_start_method")),
    **dict.fromkeys(("transformation_fn", "transformation_edit_fields", "transformation_removed_fields")),
    "metrics": [],
    "callbacks": [],
    "compress_sparse_cols": False,
    "batch_size": 32,
    "epochs": 1,
    "verbose": 1,
    "shuffle": True,
    "partitions_per_process": 10,
    "train_reader_num_workers": 2,
    "val_reader_num_workers": 2,
    "reader_pool_type": "thread",
    "inmemory_cache_all": False,
    "use_gpu": True,
    "backward_passes_per_step": 1,
    "tensorflow_dataset_prefetch_buffer_size": 0,
    "data_module": None,  # Horovod's is a class of petastorm's; None is ours
}
TORCH = dict.fromkeys(("loss_constructors", "input_shapes", "train_minibatch_fn"))
OWN: dict[str, dict[str, Any]] = {
    "torch.TorchEstimator": TORCH,
    "lightning.TorchEstimator": {
        **TORCH,
        **dict.fromkeys(("num_gpus", "logger", "loader_num_epochs", "profiler", "trainer_args")),
        **dict.fromkeys(("train_async_data_loader_queue_size", "val_async_data_loader_queue_size")),
        "log_every_n_steps": 50,
        "terminate_on_nan": False,
        "debug_data_loader": False,
    },
    "keras.KerasEstimator": {
        "custom_objects": {},
        "checkpoint_callback": None,
        "backend_env": {"LIBHDFS_OPTS": "-Xms2048m -Xmx2048m"},
    },
}
MODELS: dict[str, set[str]] = {
    "torch.TorchModel": {"optimizer", "loss"},
    "lightning.TorchModel": {"optimizer", "loss"},
    "keras.KerasModel": {"custom_objects", "_floatx"},
}


def the_class(name: str) -> Any:
    if name.startswith("keras") and importlib.util.find_spec("keras") is None:  # to load it takes long
        pytest.skip("Keras is not installed")
    module, _, cls = name.partition(".")
    return getattr(importlib.import_module(f"farandole.spark.{module}"), cls)


@pytest.mark.parametrize("name", OWN)
def test_parameters_and_defaults_are_horovods(name: str) -> None:
    made = the_class(name)()
    assert {param.name: made.getOrDefault(param) for param in made.params} == {**SHARED, **OWN[name]}


@pytest.mark.parametrize("name", OWN)
def test_each_parameter_has_its_accessors(name: str) -> None:
    made = the_class(name)()
    for param in {**SHARED, **OWN[name]}:
        word = "".join(part.capitalize() for part in param.split("_"))
        assert getattr(made, f"get{word}")() == made.getOrDefault(param), param
        assert callable(getattr(made, f"set{word}")), param
    assert made.setBatchSize(7).getBatchSize() == 7 and the_class(name)().getBatchSize() == 32
    made.getMetrics().append("mine")
    assert the_class(name)().getMetrics() == []  # a default is nobody's to change


@pytest.mark.parametrize("name", MODELS)
def test_models_have_horovods_parameters(name: str) -> None:
    shared = {"history", "model", "feature_columns", "label_columns", "run_id", "_metadata"}
    assert shared | MODELS[name] <= {param.name for param in the_class(name)().params}
