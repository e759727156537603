# Loads models from files and makes their optimizers distributed.
# Touches Keras and optimizer.
"""`load_model` calls `keras.models.load_model` and then wraps the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..operations.reductions import Average
from ..world.groups import global_process_set
from .compression import Compression
from .framework import require
from .optimizer import make


def loaded(
    keras: Any, filepath: Any, custom_optimizers: Any, custom_objects: Any, distributed: Callable[[Any], Any]
) -> Any:
    """A saved model. Its optimizer, with the saved state, is given to `distributed` and replaced by the result."""
    known = {kind.__name__: kind for kind in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**known, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = distributed(model.optimizer)
    return model


def load_model(
    filepath: Any, custom_optimizers: Any = None, custom_objects: Any = None, compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:  # fmt: skip
    """A saved model whose optimizer reduces the gradients of all ranks and has the saved state.

    `custom_optimizers`: classes that Keras does not know. `legacy_opts` is accepted for compatibility.
    """

    def distributed(optimizer: Any) -> Any:
        return make(optimizer, compression, False, 1.0, Average, 1, False, None, global_process_set, True)

    return loaded(require(), filepath, custom_optimizers, custom_objects, distributed)
