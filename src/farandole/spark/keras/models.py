# Keras models as bytes, and as functions that predict.
# Touches Keras, which library.py imports late: an executor learns only from the model's bytes which backend it is for.
"""The bytes are those of a `.keras` file."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from ...bindings.compat import env
from ..common.model import zeros
from ..common.parquet import Array, Column, Columns
from .library import KERAS, load, variables

# Losses of Keras that compare single numbers. We know nothing about losses of users.
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


def compares_numbers(loss: Any, library: str = KERAS) -> bool:
    """Whether a loss of Keras, in any of its spellings, compares each number of an output with one of the label."""
    losses = load(library).losses
    try:
        made = losses.get(loss)
    except ValueError:  # unknown to Keras: compile() raises the error
        return False
    if type(made).__module__.startswith(f"{library}."):  # its own classes are functions with a reduction
        made = getattr(made, "fn", made)
    return any(made is getattr(losses, name) for name in ELEMENTWISE)


def packed(model: Any) -> bytes:
    """A model as bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.keras")
        model.save(path)
        return path.read_bytes()


def unpacked(data: bytes, custom_objects: Any, library: str = KERAS) -> Any:
    """A model from such bytes. Lambdas are allowed, because the model is the user's own."""
    keras = load(library)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.keras")
        path.write_bytes(data)
        return keras.saving.load_model(path, custom_objects=custom_objects or None, safe_mode=False)


def inputs(batch: Columns, features: list[str], categorical: Any, library: str = KERAS) -> Any:
    """The feature columns of a batch as Keras takes them: one array, or a list."""
    kind = load(library).backend.floatx()
    made = [batch[name] if name in (categorical or ()) else batch[name].astype(kind) for name in features]
    return made[0] if len(made) == 1 else made


class Loader:
    """Makes a function that predicts, in an executor."""

    def __init__(
        self, model: bytes, custom_objects: Any, features: list[str], categorical: Any, library: str = KERAS
    ) -> None:
        self._model = model
        self._custom = custom_objects
        self._features = features
        self._categorical = categorical
        self._library = library
        self._variables, self._floatx = variables(library), load(library).backend.floatx()

    def __call__(self) -> Any:
        """The function from columns to outputs."""
        library = self._library
        if library not in sys.modules:
            with env(**self._variables):
                load(library)
        load(library).backend.set_floatx(self._floatx)
        model = unpacked(self._model, self._custom, library)

        def predict(batch: Columns) -> list[Array]:
            found = model.predict_on_batch(inputs(batch, self._features, self._categorical, library))
            return [np.asarray(one) for one in (found if isinstance(found, list | tuple) else [found])]

        return predict

    def probe(self, columns: dict[str, Column]) -> list[tuple[int, ...]]:
        """The shapes of a row's outputs."""
        return [one.shape[1:] for one in self()(zeros([columns[name] for name in self._features], 2))]
