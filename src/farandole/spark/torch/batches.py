# Columns as tensors, and the outputs of a model for them: shared by the estimators for PyTorch and Lightning.
# Touches torch.
"""Numbers get the data type of the model; categories and class indices are integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from ...launch.calls import unpack as deserialize
from ..common.parquet import Array, Column, Columns, DataError

INDEXED = (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss, torch.nn.MultiMarginLoss)
INDEXED_FUNCTIONS = (functional.cross_entropy, functional.nll_loss, functional.multi_margin_loss)


# Losses that compare single numbers. We know nothing about losses of users, so their labels are not checked.
ELEMENTWISE = (
    torch.nn.MSELoss,
    torch.nn.L1Loss,
    torch.nn.SmoothL1Loss,
    torch.nn.HuberLoss,
    torch.nn.BCELoss,
    torch.nn.BCEWithLogitsLoss,
    torch.nn.PoissonNLLLoss,
    torch.nn.SoftMarginLoss,
    torch.nn.KLDivLoss,
)
ELEMENTWISE_FUNCTIONS = (
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
    functional.poisson_nll_loss,
    functional.soft_margin_loss,
    functional.kl_div,
)


def compares_numbers(loss: Any) -> bool:
    """Whether a loss, or the class that makes it, compares each number of an output with one of the label."""
    kind: Any = loss if isinstance(loss, type) else type(loss)
    is_elementwise = any(issubclass(kind, one) and kind.forward is one.forward for one in ELEMENTWISE)
    return is_elementwise or loss in ELEMENTWISE_FUNCTIONS


def takes_classes(loss: Any) -> bool:
    """Whether a loss compares with indices of classes."""
    return isinstance(loss, INDEXED) or loss in INDEXED_FUNCTIONS


def number_type(model: torch.nn.Module) -> torch.dtype:
    """The data type of a model's parameters."""
    return next((one.dtype for one in model.parameters() if one.is_floating_point()), torch.get_default_dtype())


def tensor(values: Array, dtype: torch.dtype, device: Any, shape: Any = None, whole: bool = False) -> torch.Tensor:
    """A column's batch."""
    made = torch.from_numpy(values).to(device)
    made = made.long() if whole else made.to(dtype)
    if shape is None:
        return made
    return made.reshape([len(values) if number == -1 else number for number in shape])


def as_list(value: Any) -> list[Any]:
    """One value or several, as a list."""
    return list(value) if isinstance(value, list | tuple) else [value]


def matched(outputs: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Labels in the shapes of the outputs if the sizes are equal: (n,) and (n, 1) would be broadcast to (n, n)."""
    return [
        label.reshape(output.shape) if output.numel() == label.numel() else label
        for output, label in zip(outputs, labels, strict=True)
    ]


class Inputs:
    """Calls a model with the feature columns of a batch."""

    def __init__(self, features: list[str], shapes: Any, categorical: Any) -> None:
        self.features = features
        self.shapes = shapes or [None] * len(features)
        self.categorical = set(categorical or ())

    def tensors(self, batch: Columns, dtype: torch.dtype, device: Any) -> list[torch.Tensor]:
        """The feature columns as tensors."""
        return [
            tensor(batch[name], dtype, device, shape, name in self.categorical)
            for name, shape in zip(self.features, self.shapes, strict=True)
        ]


class Row:
    """A model's output for one row."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs

    def __call__(self, model: torch.nn.Module, row: dict[str, Any]) -> Any:
        """`row` has a value for each feature column."""
        batch = {name: np.asarray(row[name])[np.newaxis] for name in self._inputs.features}
        device = next((one.device for one in model.parameters()), torch.device("cpu"))
        with torch.no_grad():
            return model(*self._inputs.tensors(batch, number_type(model), device))


class Predictor:
    """Loads the model in an executor, and returns the function that predicts."""

    def __init__(self, model: bytes, inputs: Inputs, use_gpu: bool, by_row: Any = None) -> None:
        self._model = model
        self._inputs = inputs
        self._use_gpu = use_gpu
        self._by_row = by_row  # the user's function: from the model and a row to the output

    def __call__(self) -> Any:
        """The function from columns to outputs."""
        model = deserialize(self._model)
        device = torch.device("cuda" if self._use_gpu and torch.cuda.is_available() else "cpu")
        model.to(device).eval()

        def predict(batch: Columns) -> list[Array]:
            with torch.no_grad():
                outputs = as_list(model(*self._inputs.tensors(batch, number_type(model), device)))
            return [np.asarray(output.detach().cpu().to(torch.float64)) for output in outputs]

        def predict_rows(batch: Columns) -> list[Array]:
            with torch.no_grad():
                rows = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
                made = [[torch.as_tensor(one) for one in as_list(self._by_row(model, row))] for row in rows]
            found = (
                [one.detach().cpu().to(torch.float64).flatten() for one in outputs]
                for outputs in zip(*made, strict=True)
            )
            return [np.asarray(torch.stack(outputs)) for outputs in found]

        return predict if self._by_row is None else predict_rows


def probe(model: bytes, inputs: Inputs, columns: dict[str, Column], labels: list[str]) -> list[tuple[int, ...]]:
    """The shapes of a row's outputs. Raises DataError if the model cannot be called with such columns."""
    batch = {name: np.zeros((2, *columns[name].shape), columns[name].dtype) for name in inputs.features}
    try:
        found = Predictor(model, inputs, use_gpu=False)()(batch)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        shapes = ", ".join(f"{name!r} of shape {columns[name].shape}" for name in inputs.features)
        raise DataError(f"the model cannot be called with {shapes}: {error}") from error
    if len(found) != len(labels):
        raise DataError(f"the model has {len(found)} outputs for {len(labels)} label columns {labels}")
    return [output.shape[1:] for output in found]
