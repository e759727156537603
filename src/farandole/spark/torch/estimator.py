# TorchEstimator and TorchModel: a torch.nn.Module trained on a DataFrame, and the transformer it becomes.
# Touches torch on the driver; training.py runs in the ranks.
"""`TorchEstimator(model=..., optimizer=..., loss=..., feature_cols=..., label_cols=..., store=...).fit(df)`."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch

from ...launch.calls import pack as serialize
from ...launch.calls import unpack as deserialize
from ..common.estimator import HorovodEstimator, check_labels, check_shapes
from ..common.model import HorovodModel, Predict
from ..common.params import declare
from ..common.parquet import Column
from ..common.task import Result, Task
from . import batches
from .training import train

OF_TORCH: dict[str, Any] = {
    "loss_constructors": (None, "functions that make the losses, instead of loss", None),
    "input_shapes": (None, "shape of each feature column's batch, e.g. [-1, 1, 28, 28]", None),
    "train_minibatch_fn": (
        None,
        "instead of a step: (model, optimizer, transform_outputs, loss_fn, inputs, labels, sample_weights) "
        "-> (outputs, loss)",
        None,
    ),
}


@declare(OF_TORCH)
class TorchEstimator(HorovodEstimator):
    """Trains a torch.nn.Module."""

    FRAMEWORK = "torch"

    def _check(self) -> None:
        loss, makers = self.getOrDefault("loss"), self.getOrDefault("loss_constructors")
        if not isinstance(self.getOrDefault("model"), torch.nn.Module):
            raise ValueError(f"model={self.getOrDefault('model')!r}: expected a torch.nn.Module")
        if not isinstance(self.getOrDefault("optimizer"), torch.optim.Optimizer):
            raise ValueError("TorchEstimator needs an optimizer of torch, made for the model's parameters")
        if (loss is None) == (makers is None):
            raise ValueError("TorchEstimator needs loss or loss_constructors, and not both")
        for name, count in (("loss", loss), ("loss_constructors", makers), ("loss_weights", None)):
            value = self.getOrDefault(name) if name == "loss_weights" else count
            if value is not None and len(batches.as_list(value)) != len(self.getOrDefault("label_cols")):
                labels = len(self.getOrDefault("label_cols"))
                raise ValueError(f"{name} has {len(batches.as_list(value))} entries for {labels} label columns")

    def _double(self) -> bool:
        return bool(batches.number_type(self.getOrDefault("model")) == torch.float64)

    def _inputs(self) -> batches.Inputs:
        return batches.Inputs(
            self.getOrDefault("feature_cols"),
            self.getOrDefault("input_shapes"),
            self.getOrDefault("categorical_cols"),
        )

    def _probe(self, columns: dict[str, Column]) -> list[tuple[int, ...]]:
        features, labels = self.getOrDefault("feature_cols"), self.getOrDefault("label_cols")
        check_shapes(self.getOrDefault("input_shapes"), features, columns, "input_shapes")
        check_shapes(self.getOrDefault("label_shapes"), labels, columns, "label_shapes")
        found = batches.probe(serialize(self.getOrDefault("model")), self._inputs(), columns, labels)
        compared = [batches.compares_numbers(loss) for loss in self._losses()]
        if compared:
            check_labels(found, [columns[name] for name in labels], self.getOrDefault("label_shapes"), compared)
        return found

    def _losses(self) -> list[Any]:
        """The losses, one for each label; none if the user's own step computes the loss."""
        if self.getOrDefault("train_minibatch_fn") is not None:
            return []
        losses = self.getOrDefault("loss")
        return batches.as_list(self.getOrDefault("loss_constructors") if losses is None else losses)

    def _payload(self) -> bytes:
        names = ("model", "optimizer", "loss", "loss_constructors", "metrics")
        # One pickle, so that the optimizer still holds the parameters of the model.
        return serialize({name: self.getOrDefault(name) for name in names})

    def _work(self) -> Callable[[Task], Result | None]:
        return train

    def get_model_class(self) -> type:
        """The class of fitted models."""
        return TorchModel

    def _create_model(self, result: Result, run_id: str, metadata: Any) -> Any:
        model, optimizer = deserialize(serialize((self.getOrDefault("model"), self.getOrDefault("optimizer"))))
        state = torch.load(io.BytesIO(result.weights), map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        parameters = self._get_model_kwargs(model.eval(), result.history, optimizer, run_id, metadata)
        return self.get_model_class()(**parameters)

    def _get_model_kwargs(self, model: Any, history: Any, optimizer: Any, run_id: str, metadata: Any) -> dict[str, Any]:
        """The parameters of a fitted model; subclasses may have others."""
        return {
            "model": model,
            "optimizer": optimizer,
            "loss": self.getOrDefault("loss"),
            "loss_constructors": self.getOrDefault("loss_constructors"),
            "history": history,
            "feature_columns": self.getOrDefault("feature_cols"),
            "label_columns": self.getOrDefault("label_cols"),
            "input_shapes": self.getOrDefault("input_shapes"),
            "categorical_cols": self.getOrDefault("categorical_cols"),
            "run_id": run_id,
            "_metadata": metadata,
        }


OF_MODEL: dict[str, Any] = {
    "optimizer": (None, "the optimizer, with its state", None),
    "loss": (None, "the loss it was trained with", None),
    "loss_constructors": (None, "what made it, instead", None),
    "input_shapes": (None, "shape of each feature column's batch", None),
    "categorical_cols": (None, "columns whose whole numbers stay whole numbers", None),
}


@declare(OF_MODEL)
class TorchModel(HorovodModel):
    """A trained torch.nn.Module; `getModel()` gives it."""

    def get_prediction_fn(self) -> Callable[[Any, dict[str, Any]], Any] | None:
        """A function from the model and one row, a dict by column, to the row's output.

        For classes that build on this one: theirs may call it, or be another. If no class has one of their own, or
        it is None, the model is called with batches of the feature columns, which gives the same.
        """
        return batches.Row(self._tensors())

    def _own_prediction(self) -> Callable[[Any, dict[str, Any]], Any] | None:
        changed = type(self).get_prediction_fn is not TorchModel.get_prediction_fn
        return self.get_prediction_fn() if changed or "get_prediction_fn" in vars(self) else None

    def _tensors(self) -> batches.Inputs:
        return batches.Inputs(
            self.getOrDefault("feature_columns"),
            self.getOrDefault("input_shapes"),
            self.getOrDefault("categorical_cols"),
        )

    def _known(self) -> Any:
        return super()._known() if self._own_prediction() is None else None

    def _loader(self) -> Callable[[], Predict]:
        inputs, use_gpu, by_row = self._tensors(), self.getOrDefault("use_gpu"), self._own_prediction()
        return batches.Predictor(serialize(self.getOrDefault("model")), inputs, use_gpu, by_row)
