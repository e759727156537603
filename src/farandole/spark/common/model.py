# Trained models as transformers of Spark: `transform(df)` adds a column of predictions for each label.
# Touches Spark's pandas functions; the function that predicts is in the folder of the framework.
"""`HorovodModel` is a pyspark.ml.Model. Predictions are vectors, or numbers where the model gives one per row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
from pyspark.ml import Model
from pyspark.ml.functions import array_to_vector
from pyspark.sql import functions as F
from pyspark.sql import types as T

from .params import ModelParams
from .parquet import RAW, Array, Column, Columns, DataError, check_names
from .persistence import Saved
from .writing import plain

Predict = Callable[[Columns], list[Array]]
PREDICTED = "__farandole_predicted"


class HorovodModel(Saved, ModelParams, Model):
    """Predicts the rows of a DataFrame."""

    def _loader(self) -> Callable[[], Predict]:
        """An object that makes the predicting function in an executor."""
        raise NotImplementedError

    def _inputs(self) -> list[Column]:
        known = self.getOrDefault("_metadata")["columns"]
        return [
            Column(name, known[name]["dtype"], tuple(known[name]["shape"]))
            for name in self.getOrDefault("feature_columns")
        ]

    def _known(self) -> Any:
        """The shapes of one row's outputs, as the fit found them; None when unknown."""
        return self.getOrDefault("_metadata").get("outputs")

    def _shapes(self, rows: Any) -> list[tuple[int, ...]]:
        """The shapes of one row's outputs; if the fit did not find them, one prediction does."""
        known, inputs = self._known(), self._inputs()
        if known is None:
            one = zeros([column for column in inputs if column.dtype != RAW])
            if len(one) < len(inputs):  # zeros can stand for numbers only
                first = rows.limit(1).toPandas()
                if not len(first):
                    return [(0,)] * len(self.getOutputCols())
                one = {column.name: _values(first[column.name], column) for column in inputs}
            known = [output.shape[1:] for output in self._loader()()(one)]
        return [tuple(shape) for shape in known]

    def _transform(self, dataset: Any) -> Any:
        inputs, outputs = self._inputs(), self.getOutputCols()
        check_names([column.name for column in inputs], dataset.columns, "the DataFrame")
        kinds = {field.name: field.dataType for field in dataset.schema.fields}
        needed = [plain(one.name, kinds[one.name], one.dtype == "float64") for one in inputs]
        shapes = self._shapes(dataset.select(*needed))
        if len(shapes) != len(outputs):
            raise DataError(f"the model has {len(shapes)} outputs, but output_cols names {len(outputs)} columns")
        single = [math.prod(shape) == 1 for shape in shapes]
        fields = [
            T.StructField(f"_{index}", T.DoubleType() if one else T.ArrayType(T.DoubleType()))
            for index, one in enumerate(single)
        ]
        run = _function(self._loader(), inputs, single, self.getOrDefault("batch_size"))
        predict = F.pandas_udf(run, T.StructType(fields))  # type: ignore[call-overload,unused-ignore]
        found = dataset.select("*", predict(F.struct(*needed)).alias(PREDICTED))
        made = []
        for index, (name, one) in enumerate(zip(outputs, single, strict=True)):
            value = F.col(f"{PREDICTED}._{index}")
            made.append((value if one else array_to_vector(value)).alias(name))
        kept = [F.col(f"`{name}`") for name in dataset.columns if name not in outputs]
        return found.select(*kept, *made)


def zeros(columns: list[Column], rows: int = 1) -> Columns:
    """A batch of zeros, to call a model with."""
    return {column.name: np.zeros((rows, *column.shape), column.dtype) for column in columns}


def _function(loader: Callable[[], Predict], inputs: list[Column], single: list[bool], rows: int) -> Any:
    """Runs in executors: loads the model once per task, and predicts each frame."""

    def run(frames: Iterator[Any]) -> Iterator[Any]:
        predict = loader()
        for frame in frames:
            parts = [
                predict({column.name: _values(part[column.name], column) for column in inputs})
                for part in (frame.iloc[start : start + rows] for start in range(0, len(frame), rows))
            ]
            made = {}
            for index, one in enumerate(single):
                values = np.concatenate([part[index] for part in parts]) if parts else np.zeros((0, 1))
                flat = values.reshape(len(frame), max(1, values[:1].size)).astype(np.float64)
                made[f"_{index}"] = pd.Series(flat[:, 0]) if one else pd.Series(list(flat), dtype=object)
            yield pd.DataFrame(made)

    run.__annotations__ = {"frames": Iterator[pd.DataFrame], "return": Iterator[pd.DataFrame]}
    return run


def _values(series: Any, column: Column) -> Array:
    """A column of pandas as an array; nulls become NaN."""
    if column.dtype == RAW:
        return np.asarray(series.to_list(), dtype=object)
    if not column.shape:
        values = pd.to_numeric(series).to_numpy()
        return np.asarray(values, dtype=np.float64 if series.isna().any() else column.dtype)
    kind = np.result_type(column.dtype, np.float32) if series.isna().any() else column.dtype
    made = np.full((len(series), *column.shape), np.nan if series.isna().any() else 0, kind)
    for row, value in enumerate(series):
        if value is not None:
            found = np.asarray(value.tolist() if isinstance(value, np.ndarray) else value, dtype=column.dtype)
            if found.shape != column.shape:
                raise DataError(
                    f"column {column.name!r}: the model was trained on values of shape {column.shape}, found "
                    f"{found.shape}"
                )
            made[row] = found
    return made
