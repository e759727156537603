# init for TensorFlow: joins the job, and lets the ranks agree on how graphs reach the engine.
# Touches compiled and runtime.
"""`init` stands where scripts have `hvd.init()`."""

from __future__ import annotations

from typing import Any

from .. import runtime
from . import compiled


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Joins the job; without a launcher, a world of one. A second call does nothing.

    The first time with a version of TensorFlow its operations are compiled, which takes some seconds;
    FARANDOLE_TENSORFLOW_OPS=callback does without them. Arguments as in `farandole.init`.
    """
    runtime.init(comm, process_sets)
    try:
        compiled.prepare()
    except BaseException:
        runtime.shutdown()
        raise
