# Checks that Keras is installed and new enough; otherwise ImportError says what to install.
# Touches Keras, and private names of TensorFlow through bindings.private.
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
from ..bindings.required import missing
from ..engine.interface import Array

OLDEST = tested.OLDEST["keras"]


def check_installed() -> None:
    """Raises ImportError, which says what to install, if Keras is missing or too old. Does not import Keras."""
    if importlib.util.find_spec("keras") is None:
        raise missing(
            "farandole.keras needs Keras 3, and it is not installed: pip install 'farandole[keras]', and one of its "
            "backends (tensorflow, torch, jax)",
            "keras",
        )
    # Scripts that use tf_keras may have an old `keras`, so it is not checked if farandole.tensorflow is loaded.
    if "farandole.tensorflow" not in sys.modules:
        # If pip has no record of Keras, `require` checks the module itself.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            _check_version(importlib.metadata.version("keras"))


def _check_version(version: str) -> None:
    if not is_version_greater_equal_than(version, OLDEST):
        raise ImportError(
            f"farandole.keras needs Keras {OLDEST} or newer; this is {version}: pip install --upgrade keras "
            "(for tf_keras there is farandole.tensorflow.keras)"
        )


def require() -> Any:
    """Imports Keras. ImportError says what to install."""
    check_installed()
    import keras

    _check_version(keras.__version__)
    return keras


def array_of(value: Any) -> Array:
    """The values of a variable or tensor of any backend."""
    session = _of_sessions()
    if session is not None and hasattr(value, "graph"):
        return np.asarray(session.get_value(value))
    detached = value.detach().cpu() if hasattr(value, "detach") else value
    return np.asarray(detached.numpy() if hasattr(detached, "numpy") else detached)


def assign(variable: Any, value: Any) -> None:
    """Gives a variable of any backend a value, now."""
    session = _of_sessions()
    if session is None:
        variable.assign(value)
    else:
        session.set_value(variable, value)


def _of_sessions() -> Any:
    """What reads and writes variables where TensorFlow builds graphs for sessions, as in scripts for TensorFlow 1 with
    tf_keras; None elsewhere.
    """
    tf: Any = sys.modules.get("tensorflow")
    if tf is None or tf.compat.v1.executing_eagerly_outside_functions():
        return None
    return tf.compat.v1.keras.backend


def sync_variables_from_jax(model: Any) -> None:
    """With JAX, Keras keeps the values elsewhere during a fit: copies them into the model's variables."""
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()


def variables_of(model: Any, optimizer: Any) -> list[Any]:
    """The variables of a model and its optimizer, without gradients that are being accumulated: those belong to one
    rank.
    """
    sync_variables_from_jax(model)
    found = list(model.variables)
    seen = {id(one) for one in accumulated(optimizer)}
    if optimizer is not None:
        # tf_keras keeps an optimizer of tf.compat.v1 inside of an object without variables.
        variables = optimizer.variables if hasattr(optimizer, "variables") else optimizer.optimizer.variables
        found += list(variables() if callable(variables) and not isinstance(variables, (list, tuple)) else variables)
    return [one for one in found if not (id(one) in seen or seen.add(id(one)))]  # type: ignore[func-returns-value]
