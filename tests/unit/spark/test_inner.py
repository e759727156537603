"""Names that programs of others import from horovod.spark, and classes that build on its models.
Makes objects of the estimators' modules; starts no Spark."""

from __future__ import annotations

import importlib
from collections import namedtuple
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")
torch = pytest.importorskip("torch")

from farandole.spark.torch import TorchModel  # noqa: E402
from farandole.spark.torch.util import deserialize_fn, save_into_bio, serialize_fn  # noqa: E402
from horovod.spark.common import constants  # noqa: E402
from horovod.spark.data_loaders import pytorch_data_loaders as loaders  # noqa: E402
from horovod.spark.torch.remote import RemoteTrainer  # noqa: E402

NAMES = {
    "common.constants": """PETASTORM_HDFS_DRIVER METRIC_PRINT_FREQUENCY ARRAY CUSTOM_SPARSE NOCHANGE
        MIXED_SPARSE_DENSE_VECTOR SPARSE_VECTOR DENSE_VECTOR TOTAL_BUFFER_MEMORY_CAP_GIB BYTES_PER_GIB""",
    "torch.remote": "RemoteTrainer TOTAL_BUFFER_MEMORY_CAP_GIB BYTES_PER_GIB CUSTOM_SPARSE METRIC_PRINT_FREQUENCY",
    "lightning.remote": "RemoteTrainer",
    "torch.util": "is_module_available is_module_available_fn serialize_fn deserialize_fn save_into_bio_fn",
    "lightning.util": "serialize_fn deserialize_fn save_into_bio",
    "torch.datamodule": "PetastormDataModule DataModule",
    "lightning.datamodule": "PetastormDataModule",
    "data_loaders.pytorch_data_loaders": """PytorchDataLoader PytorchAsyncDataLoader PytorchInfiniteDataLoader
        PytorchInfiniteAsyncDataLoader PytorchInmemDataLoader PytorchInmemAsyncDataLoader""",
}


@pytest.mark.parametrize("module", NAMES)
def test_names_that_other_programs_import_exist(module: str) -> None:
    found = importlib.import_module(f"horovod.spark.{module}")
    assert [name for name in NAMES[module].split() if not hasattr(found, name)] == []


def test_accessors_are_spelt_as_horovods() -> None:
    from farandole.spark.lightning import TorchEstimator

    made: Any = TorchEstimator()
    assert made.setNumGPUs(2).getNumGPUs() == 2 == made.getNumGpus()
    assert made.setShufflingBufferSize(7).getShufflingBufferSize() == 7
    param_names = """NumGPUs Logger LogEveryNSteps DataModule LoaderNumEpochs TerminateOnNan TrainerArgs DebugDataLoader
        TrainAsyncDataLoaderQueueSize ValAsyncDataLoaderQueueSize TrainReaderNumWorker ValReaderNumWorker
        ReaderPoolType InMemoryCacheAll UseGpu MpStartMethod BackwardPassesPerStep LabelShapes RunId TransformationFn
        TransformationEditFields TransformationRemovedFields TensorflowDatasetPrefetchBufferSize PartitionsPerProcess
        ShufflingBufferSize Shuffle RandomSeed CompressSparseCols GradientCompression Verbose ValidationStepsPerEpoch
        TrainStepsPerEpoch ValBatchSize CategoricalCols ContinuousCols SampleWeightCol LossWeights InputShapes
        LossConstructors TrainMinibatchFn Optimizer Profiler"""
    assert [w for w in param_names.split() if not (hasattr(made, f"get{w}") and hasattr(made, f"set{w}"))] == []


class Doubled(TorchModel):
    """As libraries do: wraps what the model predicts with."""

    def get_prediction_fn(self) -> Any:
        inner: Any = super().get_prediction_fn()
        return lambda model, row: 2 * inner(model, row)


def test_predictions_are_a_function_that_can_be_wrapped() -> None:
    model = torch.nn.Linear(3, 2, dtype=torch.float64)
    terms = {"model": model, "feature_columns": ["a", "b"], "label_columns": ["y"]}

    module: Any = torch.nn.Module

    class Sums(module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, a: Any, b: Any) -> Any:
            return self.inner(a + b)

    columns = {"a": np.arange(6.0).reshape(2, 3), "b": np.ones((2, 3))}
    made = []
    for kind in (TorchModel, Doubled):
        one: Any = kind(**{**terms, "model": Sums()})
        predict = one.get_prediction_fn()
        assert callable(predict)
        rows = [predict(one.getModel(), {name: values[row] for name, values in columns.items()}) for row in range(2)]
        (output,) = one._loader()()(columns)
        assert np.allclose(np.stack([row.numpy().reshape(-1) for row in rows]), output.reshape(2, -1))
        made.append(output.reshape(2, -1))
    assert np.allclose(made[1], 2 * made[0]) and made[0].any()


def test_the_trainer_is_the_estimators_own() -> None:
    from farandole.spark.torch import TorchEstimator
    from farandole.spark.torch.training import train

    assert RemoteTrainer(TorchEstimator(), {}, None, "run", 0) is train


def test_objects_are_serialized_as_text_and_files() -> None:
    thing = {"a": [1, 2], "b": torch.ones(2)}
    text = serialize_fn()(thing)
    assert isinstance(text, str) and deserialize_fn()(text)["a"] == [1, 2]
    assert torch.load(save_into_bio(torch.ones(3), torch.save)).tolist() == [1.0] * 3
    assert constants.BYTES_PER_GIB == 1 << 30


# --- loaders ---------------------------------------------------------------------------------------------------------

Rows = namedtuple("Rows", "x y")


def parts(count: int = 3, rows: int = 4) -> list[Any]:
    """What a reader gives: dicts, and named tuples."""
    whole = np.arange(count * rows)
    made: list[Any] = [
        {"x": whole[at : at + rows], "y": whole[at : at + rows] * 2} for at in range(0, len(whole), rows)
    ]
    return [*made[:-1], Rows(**made[-1])]


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


def taken(loader: Any) -> list[list[int]]:
    batches = []
    for batch in loader:
        assert torch.equal(batch["y"], 2 * batch["x"])
        batches.append(batch["x"].tolist())
    return batches


@pytest.mark.parametrize("kind", ["PytorchDataLoader", "PytorchAsyncDataLoader"])
def test_a_loader_makes_batches_of_one_size(kind: str) -> None:
    more = {"async_loader_queue_size": 2} if "Async" in kind else {}
    make = getattr(loaders, kind)
    assert taken(make(reader=parts(), batch_size=5, shuffling_queue_capacity=0, **more)) == [
        [0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11],
    ]  # fmt: skip
    limited = make(reader=parts(), batch_size=5, shuffling_queue_capacity=0, limit_step_per_epoch=2, **more)
    assert len(limited) == 2 and len(taken(limited)) == 2
    shuffled = taken(make(reader=parts(), batch_size=5, shuffling_queue_capacity=100, **more))
    assert [len(batch) for batch in shuffled] == [5, 5, 2] and sorted(flat(shuffled)) == list(range(12))
    assert shuffled != [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]
    with pytest.raises(TypeError, match="no limit_step_per_epoch"):
        len(make(reader=parts(), batch_size=5, shuffling_queue_capacity=0, **more))


def test_an_infinite_loader_goes_on_where_it_was() -> None:
    loader = loaders.PytorchInfiniteDataLoader(parts(), 5, 0, limit_step_per_epoch=3)
    assert taken(loader) + taken(loader) == [[(at + index) % 12 for index in range(5)] for at in range(0, 30, 5)]
    with pytest.raises(ValueError, match="has no rows"):
        taken(loaders.PytorchInfiniteDataLoader([], 5, 0, limit_step_per_epoch=3))


@pytest.mark.parametrize("kind", ["PytorchInmemDataLoader", "PytorchInmemAsyncDataLoader"])
def test_a_loader_in_memory_reads_once(kind: str) -> None:
    loader = getattr(loaders, kind)(reader=iter(parts()), batch_size=5, num_epochs=2, shuffle=True)
    assert len(loader) == 3
    first, second = taken(loader), taken(loader)
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(12)) and first != second
    with pytest.raises(ValueError, match="2 epochs"):
        taken(loader)
