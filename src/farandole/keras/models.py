# Models from files, with their optimizer ready for several ranks.
# Touches Keras and optimizer.
"""`load_model` is `keras.models.load_model` and then DistributedOptimizer."""

from __future__ import annotations

from typing import Any

from ..groups import global_process_set
from ..reductions import Average
from .compression import Compression
from .framework import require
from .optimizer import make


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: Any = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """A saved model whose optimizer reduces the gradients of all ranks; its state is that of the file.

    `custom_optimizers`: classes that Keras does not know. `legacy_opts` is there for scripts that pass it.
    """
    keras = require()
    known = {kind.__name__: kind for kind in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**known, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = make(
            model.optimizer, compression, False, 1.0, Average, 1, False, None, global_process_set, True
        )
    return model
