# init for Keras: joins the job, and on TensorFlow prepares the operations of its graphs.
# Touches framework, runtime and, where Keras runs on TensorFlow, farandole.tensorflow.
"""`init` stands where scripts have `hvd.init()`."""

from __future__ import annotations

import importlib
from typing import Any

from .. import runtime
from .framework import require


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Joins the job; without a launcher, a world of one. A second call does nothing.

    Arguments as in `farandole.init`; on TensorFlow as `farandole.tensorflow.init`.
    """
    if require().backend.backend() == "tensorflow":
        # By name: the rooms of frameworks stand beside this one.
        importlib.import_module("farandole.tensorflow.joining").init(comm, process_sets)
    else:
        runtime.init(comm, process_sets)
