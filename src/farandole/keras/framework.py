# Keras itself: present and new enough, or words that say what to install.
# Touches the import system and the version of Keras.
"""`keras` is Keras 3; the bodies of this binding also serve the `tf_keras` of scripts for Keras 2."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import sys
from typing import Any

import numpy as np

from .. import tested
from ..compat import is_version_greater_equal_than
from ..engine import Array
from ..private.tensorflow_names import accumulated

LEAST = tested.LEAST["keras"]


def present() -> None:
    """ImportError says what to install when there is no Keras, or an old one; loads nothing."""
    if importlib.util.find_spec("keras") is None:
        raise ImportError(
            "farandole.keras needs Keras 3, and it is not installed: pip install keras, and one of its backends "
            "(tensorflow, torch, jax)"
        )
    # TensorFlow's binding uses parts of this package for tf_keras too, and Keras 2 may lie beside that.
    if "farandole.tensorflow" not in sys.modules:
        # Without a record of pip's `require` looks at the module itself.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            _refuse_old(importlib.metadata.version("keras"))


def _refuse_old(version: str) -> None:
    if not is_version_greater_equal_than(version, LEAST):
        raise ImportError(
            f"farandole.keras needs Keras {LEAST} or newer; this is {version}: pip install --upgrade keras "
            "(for tf_keras there is farandole.tensorflow.keras)"
        )


def require() -> Any:
    """Keras; ImportError says what to install."""
    present()
    import keras

    _refuse_old(keras.__version__)
    return keras


def array_of(value: Any) -> Array:
    """A variable's or tensor's values, whatever the backend."""
    detached = value.detach().cpu() if hasattr(value, "detach") else value
    return np.asarray(detached.numpy() if hasattr(detached, "numpy") else detached)


def current(model: Any) -> None:
    """Gives a model's variables their values where Keras keeps them elsewhere between the batches of a fit, on JAX."""
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()


def variables_of(model: Any, optimizer: Any) -> list[Any]:
    """What makes up the state of a model and its optimizer; gradients that are still added up belong to their rank."""
    current(model)
    found = list(model.variables)
    seen = {id(one) for one in accumulated(optimizer)}
    if optimizer is not None:
        own = optimizer.variables
        found += list(own() if callable(own) and not isinstance(own, (list, tuple)) else own)
    return [one for one in found if not (id(one) in seen or seen.add(id(one)))]  # type: ignore[func-returns-value]
