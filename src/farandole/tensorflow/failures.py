# Errors of the engine that happened inside a graph: TensorFlow turns them into its own, and here they are turned back.
# Touches TensorFlow and farandole.compiled.
"""`translated(error)` gives what eager mode would have raised."""

from __future__ import annotations

from ..compiled import meant
from .framework import tf


def translated(error: Exception) -> Exception | None:
    """What an operation of ours raised inside the graph; None when the error comes from something else."""
    return meant(str(error.message)) if isinstance(error, tf.errors.OpError) else None
