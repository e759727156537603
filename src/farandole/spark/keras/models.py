# Keras models as bytes, and as functions that predict.
# Touches Keras, which it imports late: an executor learns only from the model's bytes which backend it is for.
"""The bytes are those of a `.keras` file."""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from ...compat import env
from ..common.model import zeros
from ..common.parquet import Array, Column, Columns

# Losses of Keras that compare number with number. Those of users may do anything.
ELEMENTWISE = (
    "mean_squared_error",
    "mean_absolute_error",
    "mean_absolute_percentage_error",
    "mean_squared_logarithmic_error",
    "binary_crossentropy",
    "categorical_crossentropy",
    "huber",
    "log_cosh",
    "poisson",
    "kl_divergence",
)


def compares_numbers(loss: Any) -> bool:
    """Whether a loss of Keras, in any of its spellings, compares each number of an output with one of the label."""
    losses = importlib.import_module("keras").losses
    try:
        made = losses.get(loss)
    except ValueError:  # unknown to Keras: compiling says so
        return False
    if type(made).__module__.startswith("keras."):  # its own classes are functions with a reduction
        made = getattr(made, "fn", made)
    return any(made is getattr(losses, name) for name in ELEMENTWISE)


def packed(model: Any) -> bytes:
    """A model as bytes."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "model.keras")
        model.save(path)
        return path.read_bytes()


def unpacked(data: bytes, custom_objects: Any) -> Any:
    """The other way. Lambdas are allowed: the model is the user's own."""
    keras = importlib.import_module("keras")
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "model.keras")
        path.write_bytes(data)
        return keras.saving.load_model(path, custom_objects=custom_objects or None, safe_mode=False)


def inputs(batch: Columns, features: list[str], categorical: Any) -> Any:
    """The feature columns of a batch as Keras takes them: one array, or a list."""
    keras = importlib.import_module("keras")
    made = [
        batch[name] if name in (categorical or ()) else batch[name].astype(keras.config.floatx()) for name in features
    ]
    return made[0] if len(made) == 1 else made


class Loader:
    """Makes a function that predicts, in an executor."""

    def __init__(self, model: bytes, custom_objects: Any, features: list[str], categorical: Any) -> None:
        self._model = model
        self._custom = custom_objects
        self._features = features
        self._categorical = categorical
        keras = importlib.import_module("keras")
        self._backend, self._floatx = keras.backend.backend(), keras.config.floatx()

    def __call__(self) -> Any:
        """The function from columns to outputs."""
        if "keras" not in sys.modules:
            with env(KERAS_BACKEND=self._backend):
                importlib.import_module("keras")
        importlib.import_module("keras").config.set_floatx(self._floatx)
        model = unpacked(self._model, self._custom)

        def predict(batch: Columns) -> list[Array]:
            found = model.predict_on_batch(inputs(batch, self._features, self._categorical))
            return [np.asarray(one) for one in (found if isinstance(found, list | tuple) else [found])]

        return predict

    def probe(self, columns: dict[str, Column]) -> list[tuple[int, ...]]:
        """The shapes of a row's outputs."""
        return [one.shape[1:] for one in self()(zeros([columns[name] for name in self._features], 2))]
