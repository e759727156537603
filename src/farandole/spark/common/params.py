# The parameters of estimators and of the models they make: one table, from which Spark's Params and their
# accessors are made. Touches only pyspark.ml.param.
"""`EstimatorParams` and `ModelParams`; `declare(table)` adds parameters to a class, with setters and getters."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pyspark.ml.param import Param, Params, TypeConverters

Class = TypeVar("Class", bound=type)
Row = tuple[
    Any, str, Callable[[Any], Any] | None
]  # default, documentation, and a function that checks and converts a value
INT, FLOATS, STRING = TypeConverters.toInt, TypeConverters.toListFloat, TypeConverters.toString
STRINGS, BOOL = TypeConverters.toListString, TypeConverters.toBoolean


def _positive(value: Any) -> int:
    made = INT(value)
    if made < 1:
        raise TypeError(f"{value!r}: expected at least 1")
    return int(made)


def _validation(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise TypeError(f"{value!r}: expected a fraction of the rows from 0 to 1, or the name of a column")
    return float(value)


ESTIMATOR: dict[str, Row] = {
    "num_proc": (None, "how many ranks train; Spark's default parallelism unless given", _positive),
    "store": (None, "a Store: where data, checkpoints and logs lie", None),
    "backend": (None, "a Backend: where the ranks run; instead of num_proc", None),
    "model": (None, "the model to train", None),
    "optimizer": (None, "its optimizer", None),
    "loss": (None, "the loss, or a list with one per label column", None),
    "loss_weights": (None, "how much each label's loss counts", FLOATS),
    "sample_weight_col": (None, "column of each row's weight", STRING),
    "metrics": ([], "what is measured besides the loss", None),
    "feature_cols": (None, "columns that the model is called with, in this order", STRINGS),
    "label_cols": (None, "columns that its outputs are compared with, in this order", STRINGS),
    "continuous_cols": (None, "accepted: what is not categorical is continuous", STRINGS),
    "categorical_cols": (None, "columns whose whole numbers stay whole numbers", STRINGS),
    "validation": (None, "part of the rows, or a column that is true or above 0, to validate with", _validation),
    "gradient_compression": (None, "one of the framework's Compression", None),
    "compress_sparse_cols": (False, "accepted: Parquet stores the zeros of vectors in few bytes", BOOL),
    "batch_size": (32, "rows of a rank's step", _positive),
    "val_batch_size": (None, "rows of a validation step; batch_size unless given", _positive),
    "epochs": (1, "passes over the data", _positive),
    "verbose": (1, "0: silent, 1: a line per epoch", INT),
    "callbacks": ([], "callbacks of the framework", None),
    "random_seed": (None, "decides the order of rows and the split; drawn unless given", INT),
    "shuffle_buffer_size": (None, "accepted: the shuffling needs no buffer of the user's size", INT),
    "shuffle": (True, "whether rows come in random order", BOOL),
    "partitions_per_process": (10, "files per rank that the data is written to", _positive),
    "run_id": (None, "name of the run; one that has a checkpoint goes on from it", STRING),
    "train_steps_per_epoch": (None, "steps of an epoch, unless it is a pass over the data", _positive),
    "validation_steps_per_epoch": (None, "steps of a validation, unless it is all of the data", _positive),
    "transformation_fn": (
        None,
        "from a pandas frame of the data to another one of as many rows; texts and bytes become numbers in it",
        None,
    ),
    "transformation_edit_fields": (None, "(name, type, shape, nullable) of the fields it changes", None),
    "transformation_removed_fields": (None, "names of the fields it removes", STRINGS),
    "train_reader_num_workers": (2, "accepted: one thread reads ahead", INT),
    "val_reader_num_workers": (2, "accepted: one thread reads ahead", INT),
    "reader_pool_type": ("thread", "accepted: it is a thread", STRING),
    "label_shapes": (None, "shape of each label column's batch, e.g. [-1, 1]", None),
    "inmemory_cache_all": (False, "whether each rank keeps what it has read in memory", BOOL),
    "use_gpu": (True, "whether to train on the rank's GPU where there is one", BOOL),
    "mp_start_method": (None, "accepted: no process is started for reading", STRING),
    "backward_passes_per_step": (1, "steps whose gradients are added up before they are reduced", _positive),
    "tensorflow_dataset_prefetch_buffer_size": (0, "accepted: one window of rows is read ahead", INT),
    "data_module": (None, "a DataModule class, unless it is ParquetDataModule", None),
}
MODEL: dict[str, Row] = {
    "history": (None, "what was measured in each epoch", None),
    "model": (None, "the trained model", None),
    "feature_columns": (None, "columns that the model is called with", STRINGS),
    "label_columns": (None, "columns that it was trained on", STRINGS),
    "output_cols": (None, "columns of its predictions; each label's name and __output unless given", STRINGS),
    "run_id": (None, "name of the run", STRING),
    "_metadata": (None, "types and shapes of the columns", None),
    "batch_size": (1024, "rows that are predicted at once", _positive),
    "use_gpu": (False, "whether to predict on a GPU where there is one", BOOL),
}
# Accessors whose names are not those of the parameter, as Horovod wrote them.
SPELLINGS = {
    "train_reader_num_workers": "TrainReaderNumWorker",
    "val_reader_num_workers": "ValReaderNumWorker",
    "inmemory_cache_all": "InMemoryCacheAll",
    "num_gpus": "NumGPUs",
    "shuffle_buffer_size": "ShufflingBufferSize",
    "label_columns": "LabelColoumns",
}


def camel(name: str) -> str:
    """The name of a parameter inside its accessors'.

    >>> camel("batch_size")
    'BatchSize'
    """
    return "".join(word.capitalize() for word in name.split("_"))


def declare(table: Mapping[str, Row]) -> Callable[[Class], Class]:
    """A class decorator: the parameters of a table, each with `setName` and `getName`."""

    def decorate(cls: Class) -> Class:
        owner = Params()  # Spark's own classes also start without a parent
        owner.uid = "undefined"
        for name, (default, doc, convert) in table.items():
            setattr(cls, name, Param(owner, name, doc, convert))

            def put(self: Any, value: Any, name: str = name) -> Any:
                return self._set(**{name: value})

            def take(self: Any, name: str = name) -> Any:
                return self.getOrDefault(name)

            for spelling in filter(None, (camel(name), SPELLINGS.get(name))):
                for accessor, function in ((f"set{spelling}", put), (f"get{spelling}", take)):
                    if accessor not in vars(cls):  # some classes define this accessor themselves
                        setattr(cls, accessor, function)
            defaults: dict[str, Any] = {**getattr(cls, "DEFAULTS", {}), name: default}
            cls.DEFAULTS = defaults  # type: ignore[attr-defined]
        return cls

    return decorate


class Declared(Params):
    """Parameters by keyword, with the defaults of their tables."""

    DEFAULTS: dict[str, Any] = {}

    def __init__(self, **values: Any) -> None:
        super().__init__()
        self._setDefault(**{name: _fresh(value) for name, value in self.DEFAULTS.items()})
        for name in values:
            if name not in self.DEFAULTS:
                near = difflib.get_close_matches(name, self.DEFAULTS, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise TypeError(f"{type(self).__name__} has no parameter {name!r}{hint}")
        self._set(**values)

    def setParams(self, **values: Any) -> Any:
        """Sets several parameters."""
        return self._set(**values)


def _fresh(value: Any) -> Any:
    return type(value)(value) if isinstance(value, list | dict) else value


@declare(ESTIMATOR)
class EstimatorParams(Declared):
    """The parameters of every estimator."""


@declare(MODEL)
class ModelParams(Declared):
    """The parameters of every trained model."""

    def setOutputCols(self, value: list[str]) -> Any:
        """Names the columns of predictions."""
        return self._set(output_cols=value)

    def getOutputCols(self) -> list[str]:
        """The columns of predictions."""
        columns = self.getOrDefault("output_cols")
        return list(columns or [f"{name}__output" for name in self.getOrDefault("label_columns") or []])
