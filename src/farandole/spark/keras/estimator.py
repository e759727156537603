# KerasEstimator and KerasModel: a Keras model trained on a DataFrame, and the transformer it becomes.
# Touches Keras on the driver; training.py runs in the ranks.
"""Keras 3 on its backends, and tf_keras; ranks and executors use the driver's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ...launch.calls import pack as serialize
from ...launch.calls import unpack as deserialize
from ..common.estimator import HorovodEstimator, check_labels, check_shapes
from ..common.model import HorovodModel, Predict
from ..common.params import declare
from ..common.parquet import Column, DataError
from ..common.task import Result, Task
from . import models
from .library import KERAS, LEGACY, library_of, load, variables
from .training import train

OF_KERAS: dict[str, Any] = {
    "custom_objects": ({}, "classes and functions of the model that Keras does not know, by name", None),
    "checkpoint_callback": (None, "one more callback, on rank 0 alone", None),
    "backend_env": ({"LIBHDFS_OPTS": "-Xms2048m -Xmx2048m"}, "variables of the ranks", None),
}


@declare(OF_KERAS)
class KerasEstimator(HorovodEstimator):
    """Trains a Keras model; optimizer and loss are those it was compiled with unless given."""

    FRAMEWORK = "keras"

    def _check(self) -> None:
        model = self.getOrDefault("model")
        if library_of(model) is None:
            raise ValueError(f"model={model!r}: expected a model of Keras 3, or of tf_keras")
        if self._given("optimizer") is None or self._given("loss") is None:
            raise ValueError("KerasEstimator needs optimizer and loss, or a model that was compiled with them")

    def _given(self, name: str) -> Any:
        value = self.getOrDefault(name)
        model = self.getOrDefault("model")
        # tf_keras does not say whether a model was compiled, and has None for what it was not compiled with.
        if value is None and (getattr(model, "compiled", False) or self._library() == LEGACY):
            value = getattr(model, name, None)
        return value

    def _library(self) -> str:
        return library_of(self.getOrDefault("model")) or KERAS

    def _keras(self) -> Any:
        return load(self._library())

    def _double(self) -> bool:
        return bool(self._keras().backend.floatx() == "float64")

    def _env(self) -> dict[str, str]:
        return {**(self.getOrDefault("backend_env") or {}), **variables(self._library())}

    def _probe(self, columns: dict[str, Column]) -> list[tuple[int, ...]]:
        features, labels = self.getOrDefault("feature_cols"), self.getOrDefault("label_cols")
        check_shapes(self.getOrDefault("label_shapes"), labels, columns, "label_shapes")
        loader = models.Loader(
            self._packed(), self.getOrDefault("custom_objects"), features, self.getOrDefault("categorical_cols"),
            self._library(),
        )  # fmt: skip
        try:
            found = loader.probe(columns)
        except Exception as error:  # each backend of Keras raises other errors
            shapes = ", ".join(f"{name!r} of shape {columns[name].shape}" for name in features)
            raise DataError(f"the model cannot be called with {shapes}: {error}") from error
        if len(found) != len(labels):
            raise DataError(f"the model has {len(found)} outputs for {len(labels)} label columns {labels}")
        loss = self._given("loss")
        losses = list(loss) if isinstance(loss, list | tuple) else [loss]
        if len(losses) == len(labels) and not isinstance(loss, dict):  # by name: Keras itself matches them
            compared = [models.compares_numbers(one, self._library()) for one in losses]
            check_labels(found, [columns[name] for name in labels], self.getOrDefault("label_shapes"), compared)
        return found

    def _packed(self) -> bytes:
        return models.packed(self.getOrDefault("model"))

    def _payload(self) -> bytes:
        optimizer = self._given("optimizer")
        return serialize(
            {
                "custom_objects": self.getOrDefault("custom_objects"),
                "model": self._packed(),
                "optimizer": optimizer if isinstance(optimizer, str) else self._keras().optimizers.serialize(optimizer),
                "loss": self._given("loss"),
                "metrics": self.getOrDefault("metrics"),
            }
        )

    def _work(self) -> Callable[[Task], Result | None]:
        return functools.partial(train, library=self._library())

    def get_model_class(self) -> type:
        """The class of fitted models."""
        return KerasModel

    def _create_model(self, result: Result, run_id: str, metadata: Any) -> Any:
        model = models.unpacked(result.weights, self.getOrDefault("custom_objects"), self._library())
        return self.get_model_class()(**self._get_model_kwargs(model, result.history, run_id, metadata))

    def _get_model_kwargs(self, model: Any, history: Any, run_id: str, metadata: Any) -> dict[str, Any]:
        """The parameters of a fitted model; subclasses may have others."""
        return {
            "model": model,
            "custom_objects": self.getOrDefault("custom_objects"),
            "history": history,
            "feature_columns": self.getOrDefault("feature_cols"),
            "label_columns": self.getOrDefault("label_cols"),
            "categorical_cols": self.getOrDefault("categorical_cols"),
            "run_id": run_id,
            "_metadata": metadata,
            "_floatx": self._keras().backend.floatx(),
        }

    def freeze(self, values: dict[str, Any]) -> dict[str, Any]:
        """For saving."""
        return _freeze(values)

    def thaw(self, values: dict[str, Any]) -> dict[str, Any]:
        """For loading."""
        return _thaw(values)


OF_MODEL: dict[str, Any] = {
    "custom_objects": ({}, "classes and functions of the model that Keras does not know, by name", None),
    "categorical_cols": (None, "columns whose whole numbers stay whole numbers", None),
    "_floatx": ("float32", "what the model calculates with", None),
}


@declare(OF_MODEL)
class KerasModel(HorovodModel):
    """A trained Keras model; `getModel()` gives it."""

    def _loader(self) -> Callable[[], Predict]:
        return models.Loader(
            models.packed(self.getOrDefault("model")),
            self.getOrDefault("custom_objects"),
            self.getOrDefault("feature_columns"),
            self.getOrDefault("categorical_cols"),
            library_of(self.getOrDefault("model")) or KERAS,
        )

    def freeze(self, values: dict[str, Any]) -> dict[str, Any]:
        """For saving."""
        return _freeze(values)

    def thaw(self, values: dict[str, Any]) -> dict[str, Any]:
        """For loading."""
        return _thaw(values)


# tf_keras leaves this mark in what is saved; what is saved without it is of Keras 3.
MARK = "_library"


def _freeze(values: dict[str, Any]) -> dict[str, Any]:
    """What is Keras's in its own format: its pickles need to know the custom objects before they are read."""
    made = dict(values)
    library = library_of(values.get("model")) or KERAS
    if values.get("model") is not None:
        made["model"] = models.packed(values["model"])
    optimizer = values.get("optimizer")
    if optimizer is not None and not isinstance(optimizer, str):
        made["optimizer"] = serialize(load(library).optimizers.serialize(optimizer))
    return made if library == KERAS else {**made, MARK: library}


def _thaw(values: dict[str, Any]) -> dict[str, Any]:
    made, custom = dict(values), values.get("custom_objects")
    library = made.pop(MARK, KERAS)
    if values.get("model") is not None:
        made["model"] = models.unpacked(values["model"], custom, library)
    if isinstance(values.get("optimizer"), bytes):
        made["optimizer"] = load(library).optimizers.deserialize(
            deserialize(values["optimizer"]), custom_objects=custom
        )
    return made
