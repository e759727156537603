# The common part of all estimators: checks, writes the data, runs the ranks, makes a model from the result of rank 0.
# Touches Spark, the store and the backend. The code for one framework is in a folder of its own.
"""`HorovodEstimator` is a pyspark.ml.Estimator: use `fit(df)` alone or in a Pipeline."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from pyspark.ml import Estimator

from ..session import active
from .backend import Backend, SparkBackend
from .model import HorovodModel as HorovodModel
from .params import EstimatorParams
from .parquet import RAW, Column, DataError, Dataset, inspect, not_numbers
from .persistence import Saved
from .store import AbstractFilesystemStore, StoreError
from .task import Result, Task
from .writing import Wanted, prepare

# Parameters that only the driver needs.
OF_DRIVER = ("store", "backend", "num_proc", "model", "optimizer", "loss", "loss_constructors", "metrics")


class HorovodEstimator(Saved, EstimatorParams, Estimator[Any]):
    """Trains a model on the rows of a DataFrame, with several ranks."""

    FRAMEWORK = ""

    # Methods of the frameworks' estimators.

    def _check(self) -> None:
        """Raises an error for parameters that contradict each other."""
        raise NotImplementedError

    def _payload(self) -> bytes:
        """Model, optimizer and related objects for the ranks."""
        raise NotImplementedError

    def _work(self) -> Callable[[Task], Result | None]:
        """The function that each rank runs."""
        raise NotImplementedError

    def _probe(self, columns: dict[str, Column]) -> list[tuple[int, ...]]:
        """The shapes of the model's outputs for such columns. Raises DataError if it cannot be called with them."""
        raise NotImplementedError

    def _double(self) -> bool:
        """Whether the model calculates with 64 bits."""
        return False

    def get_model_class(self) -> type:
        """The class of fitted models."""
        raise NotImplementedError

    def _create_model(self, result: Result, run_id: str, metadata: Any) -> Any:
        """A fitted model of that class, with the parameters of `_get_model_kwargs`."""
        raise NotImplementedError

    def _get_or_create_backend(self) -> Backend:
        """Where the ranks run: the backend that was given, or Spark."""
        backend = self.getOrDefault("backend")
        if backend is not None and self.getOrDefault("num_proc") is not None:
            raise ValueError("give num_proc or backend: a backend has its own number of ranks")
        return backend or SparkBackend(self.getOrDefault("num_proc"))

    # Methods for users. `fit(df, params)` is Spark's own method.

    def fit_on_parquet(self, params: dict[Any, Any] | None = None, dataset_idx: Any = None) -> Any:
        """Fits on Parquet files in the store's folder for data: `store.get_train_data_path(dataset_idx)`."""
        if params:
            return self.copy(params).fit_on_parquet(dataset_idx=dataset_idx)
        backend, store = self._begin()
        return self._train(backend, store, dataset_idx, self._seed())

    def _fit(self, dataset: Any) -> Any:
        backend, store = self._begin()
        seed = self._seed()
        # Spread over files at random, so that a window of rows is a fair sample; unshuffled rows stay in order.
        files = backend.num_processes() * self.getOrDefault("partitions_per_process")
        wanted = Wanted(
            store,
            tuple(dict.fromkeys(self._columns())),
            self.getOrDefault("validation"),
            seed,
            files if self.getOrDefault("shuffle") else None,
            self._double(),
            self.getOrDefault("transformation_fn") is not None,
        )
        return self._train(backend, store, prepare(dataset, wanted), seed)

    def _columns(self) -> list[str]:
        weight = self.getOrDefault("sample_weight_col")
        return [
            *self.getOrDefault("feature_cols"),
            *self.getOrDefault("label_cols"),
            *([weight] if weight is not None else []),
        ]

    def _seed(self) -> int:
        seed = self.getOrDefault("random_seed")
        return secrets.randbits(31) if seed is None else int(seed) & 0x7FFFFFFF

    def _begin(self) -> tuple[Backend, AbstractFilesystemStore]:
        """Checks everything that can be checked before the data is read."""
        active()
        name = type(self).__name__
        for needed in ("model", "feature_cols", "label_cols"):
            if not self.getOrDefault(needed) and (needed != "model" or self.getOrDefault("model") is None):
                raise ValueError(f"{name} needs {needed}")
        self._check()
        store, backend = self.getOrDefault("store"), self._get_or_create_backend()
        if not isinstance(store, AbstractFilesystemStore):
            raise ValueError(f"{name} needs a store, e.g. store=Store.create('/shared/folder'); found {store!r}")
        if store.in_one_process:
            raise StoreError(
                f"the store {store.prefix_path} exists only in this process, and executors and ranks cannot reach it. "
                "Give a path or a URL that all of them reach"
            )
        store.check()
        return backend, store

    def _train(self, backend: Backend, store: AbstractFilesystemStore, index: Any, seed: int) -> Any:
        train, val = self._datasets(store, index, backend.num_processes())
        columns = {column.name: column for column in train.columns}
        outputs = self._probe(columns) if self.getOrDefault("transformation_fn") is None else None
        run_id = self.getOrDefault("run_id") or f"{self.FRAMEWORK}_{int(time.time())}_{secrets.token_hex(3)}"
        options = {param.name: self.getOrDefault(param) for param in self.params if param.name not in OF_DRIVER}
        resume = store.saving_runs() and store.exists(store.get_checkpoint_path(run_id))
        task = Task(store.to_remote(run_id, index), train, val, seed, resume, options, self._payload())
        result = backend.run(self._work(), args=(task,), env=self._env())[0]
        metadata = {
            "columns": {name: {"dtype": column.dtype, "shape": list(column.shape)} for name, column in columns.items()},
            "outputs": outputs,
        }
        return self._create_model(result, run_id, metadata)

    def _env(self) -> dict[str, str]:
        return {}

    def _datasets(self, store: AbstractFilesystemStore, index: Any, ranks: int) -> tuple[Dataset, Dataset | None]:
        names = list(dict.fromkeys(self._columns()))
        path = store.get_train_data_path(index)
        train = self._fitting(inspect_or_empty(store, path, names), ranks, "training")
        if self.getOrDefault("validation") is None:
            return train, None
        if not store.is_parquet_dataset(store.get_val_data_path(index)):
            raise DataError(f"validation={self.getOrDefault('validation')!r} leaves no rows to validate with")
        return train, self._fitting(inspect(store, store.get_val_data_path(index), names), ranks, "validation")

    def _fitting(self, data: Dataset, ranks: int, purpose: str) -> Dataset:
        if data.rows == 0:
            raise DataError(f"there are no rows for {purpose}: the DataFrame is empty, or validation takes all of it")
        if data.rows < ranks:
            raise DataError(
                f"{data.rows} rows for {purpose} are too few for {ranks} ranks: each needs at least one. "
                f"Set num_proc to at most {data.rows}"
            )
        labels = [*self.getOrDefault("label_cols"), self.getOrDefault("sample_weight_col")]
        for column in data.columns:
            if column.dtype == RAW and self.getOrDefault("transformation_fn") is None:
                raise DataError(not_numbers(column.name, "text or bytes"))
            if column.nulls and column.name in labels:
                raise DataError(f"column {column.name!r} has nulls: drop or fill these rows (features become NaN)")
        return data


def inspect_or_empty(store: AbstractFilesystemStore, path: str, names: list[str]) -> Dataset:
    """Prepared data. A DataFrame without rows gives an empty folder."""
    if store.exists(path) and not store.is_parquet_dataset(path):
        return Dataset((), (), 0)
    return inspect(store, path, names)


def row_shape(shapes: Any, index: int, column: Column) -> tuple[int, ...] | None:
    """The shape of one row's label as a loss gets it; None if the shape of the batch does not show it."""
    shape = None if shapes is None else tuple(shapes[index])
    if shape is None:
        return column.shape
    return shape[1:] if shape[:1] == (-1,) and -1 not in shape[1:] else None


def check_labels(
    outputs: Sequence[tuple[int, ...]], labels: Sequence[Column], shapes: Any, compared: Sequence[bool]
) -> None:
    """Raises DataError if a loss needs equal shapes and they differ, because frameworks would broadcast."""
    for index, (output, label, each) in enumerate(zip(outputs, labels, compared, strict=True)):
        shape = row_shape(shapes, index, label)
        if each and shape is not None and math.prod(output) != math.prod(shape):
            raise DataError(
                f"label column {label.name!r} has values of shape {shape}, and the model's output for it is of shape "
                f"{tuple(output)}: its loss needs equal shapes. Change the model's last layer or the column, "
                "or take a loss for classes"
            )


def check_shapes(shapes: Any, names: list[str], columns: dict[str, Column], parameter: str) -> None:
    """DataError unless each column has a shape that fits its values."""
    if shapes is None:
        return
    if len(shapes) != len(names):
        raise DataError(f"{parameter} has {len(shapes)} shapes for {len(names)} columns {names}")
    for shape, name in zip(shapes, names, strict=True):
        held = fixed = 1
        for number in columns[name].shape:
            held *= number
        for number in shape:
            fixed *= number if number != -1 else 1
        if fixed != held:
            raise DataError(
                f"{parameter}: column {name!r} has values of shape {columns[name].shape}, which do not fit "
                f"{list(shape)}; -1 stands for the rows"
            )
