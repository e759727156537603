# Finds the Keras library of a model: Keras 3, or tf_keras if TF_USE_LEGACY_KERAS is set.
# Touches either Keras, by name, and its binding.
"""Drivers send its name to ranks and executors: `KERAS` or `LEGACY`."""

from __future__ import annotations

import sys
from typing import Any

from ...base.named import module_of
from ...keras.framework import require

KERAS, LEGACY = "keras", "tf_keras"


def library_of(model: Any) -> str | None:
    """The name of the library of a model; None when it is neither."""
    legacy = sys.modules.get(LEGACY)
    if legacy is not None and isinstance(model, legacy.Model):
        return LEGACY
    return KERAS if isinstance(model, require().Model) else None


def load(library: str) -> Any:
    """Keras itself."""
    return module_of(library)


def binding(library: str) -> Any:
    """The module that replaces `horovod.keras`, or `horovod.tensorflow.keras`."""
    if library == KERAS:
        from ... import keras

        return keras
    from ...tensorflow import keras as legacy

    return legacy


def backend(library: str) -> str:
    """The name of its backend."""
    return str(load(library).backend.backend()) if library == KERAS else "tensorflow"


def variables(library: str) -> dict[str, str]:
    """The environment that gives a process the same Keras."""
    return {"KERAS_BACKEND": backend(library)} if library == KERAS else {"TF_USE_LEGACY_KERAS": "1"}
