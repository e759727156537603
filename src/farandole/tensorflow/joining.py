# init for TensorFlow: joins the job, and the ranks agree how graphs call the engine.
# Touches the rooms compiled and bindings.compiled.
"""`init` replaces `hvd.init()` of scripts."""

from __future__ import annotations

from typing import Any

from ..bindings.compiled import join
from . import compiled


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Joins the job. Without a launcher the world has one rank. A second call does nothing.

    With a new version of TensorFlow the first call compiles the operations, which takes some seconds;
    FARANDOLE_TENSORFLOW_OPS=callback avoids this. Arguments as in `farandole.init`.
    """
    join(compiled.prepare, comm, process_sets)
