# Keras itself: present and new enough or an ImportError says what to install.
# Touches the import system and the version of Keras.
"""`keras` is Keras 3. The code of this binding also works with `tf_keras`, for scripts for Keras 2."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import sys
from typing import Any

import numpy as np

from ..base import tested
from ..bindings.compat import is_version_greater_equal_than
from ..bindings.private.tensorflow_names import accumulated
from ..engine.interface import Array

OLDEST = tested.OLDEST["keras"]


def present() -> None:
    """ImportError says what to install if Keras is missing or too old; loads nothing."""
    if importlib.util.find_spec("keras") is None:
        raise ImportError(
            "farandole.keras needs Keras 3, and it is not installed: pip install 'farandole[keras]', and one of "
            "its backends "
            "(tensorflow, torch, jax)"
        )
    # TensorFlow's binding uses parts of this package also for tf_keras; then Keras 2 may be installed too.
    if "farandole.tensorflow" not in sys.modules:
        # If pip has no record of Keras, `require` checks the module itself.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            _refuse_old(importlib.metadata.version("keras"))


def _refuse_old(version: str) -> None:
    if not is_version_greater_equal_than(version, OLDEST):
        raise ImportError(
            f"farandole.keras needs Keras {OLDEST} or newer; this is {version}: pip install --upgrade keras "
            "(for tf_keras there is farandole.tensorflow.keras)"
        )


def require() -> Any:
    """Imports Keras. ImportError says what to install."""
    present()
    import keras

    _refuse_old(keras.__version__)
    return keras


def array_of(value: Any) -> Array:
    """The values of a variable or tensor of any backend."""
    detached = value.detach().cpu() if hasattr(value, "detach") else value
    return np.asarray(detached.numpy() if hasattr(detached, "numpy") else detached)


def current(model: Any) -> None:
    """On JAX: updates a model's variables, whose values Keras keeps elsewhere between the batches of a fit."""
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()


def variables_of(model: Any, optimizer: Any) -> list[Any]:
    """The variables of a model and its optimizer, without gradients that are being accumulated: those belong to one
    rank.
    """
    current(model)
    found = list(model.variables)
    seen = {id(one) for one in accumulated(optimizer)}
    if optimizer is not None:
        own = optimizer.variables
        found += list(own() if callable(own) and not isinstance(own, (list, tuple)) else own)
    return [one for one in found if not (id(one) in seen or seen.add(id(one)))]  # type: ignore[func-returns-value]
