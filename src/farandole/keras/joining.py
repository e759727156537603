# init for Keras: joins the job, and on TensorFlow and JAX prepares the operations of compiled steps.
# Touches framework, runtime and, where Keras runs on them, farandole.tensorflow or farandole.jax.
"""`init` stands where scripts have `hvd.init()`."""

from __future__ import annotations

import importlib
from typing import Any

from .. import runtime
from .framework import require


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Joins the job; without a launcher, a world of one. A second call does nothing.

    Arguments as in `farandole.init`; on TensorFlow as `farandole.tensorflow.init`, on JAX as `farandole.jax.init`.
    """
    backend = require().backend.backend()
    if backend in ("tensorflow", "jax"):
        # By name: the rooms of frameworks stand beside this one.
        importlib.import_module(f"farandole.{backend}.joining").init(comm, process_sets)
    else:
        runtime.init(comm, process_sets)
