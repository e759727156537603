# init for Keras: joins the job and, on TensorFlow and JAX, prepares the operations of compiled steps.
# Touches the room world; the file framework; where Keras runs on them, farandole.tensorflow or farandole.jax.
"""`init` replaces `hvd.init()` of scripts."""

from __future__ import annotations

from typing import Any

from ..world import basics
from .framework import require


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Joins the job. Without a launcher the world has one rank. A second call does nothing.

    Arguments as in `farandole.init`; on TensorFlow as `farandole.tensorflow.init`, on JAX as `farandole.jax.init`.
    """
    backend = require().backend.backend()
    if backend == "tensorflow":
        from ..tensorflow.joining import init as join
    elif backend == "jax":
        from ..jax.joining import init as join
    else:
        join = basics.init
    join(comm, process_sets)
