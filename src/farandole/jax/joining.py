# init and shutdown for JAX: joins the job, lets the ranks agree on how compiled functions reach the engine, leaves.
# Touches compiled, failures and runtime.
"""`init` and `shutdown` stand where scripts have `hvd.init()` and `hvd.shutdown()`."""

from __future__ import annotations

import atexit
import contextlib
import sys
from typing import Any

from .. import runtime
from . import compiled
from .failures import forget, settle

_registered = False


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Joins the job; without a launcher, a world of one. A second call does nothing.

    The first time with a version of JAX its calls are compiled, which takes some seconds; FARANDOLE_JAX_OPS=callback
    does without them. Arguments as in `farandole.init`.
    """
    global _registered
    if not runtime.is_initialized():
        forget()  # what failed in another world
    runtime.init(comm, process_sets)
    try:
        compiled.prepare()
    except BaseException:
        runtime.shutdown()
        raise
    if not _registered:
        _registered = True
        atexit.register(_at_exit)  # after the runtime's, so that it runs before that


def shutdown() -> None:
    """Leaves the job, once the compiled functions that were begun are done."""
    if runtime.is_initialized() and sys.exc_info()[0] is None:
        with contextlib.suppress(Exception):  # it has failed, and nobody has asked for the result
            settle()
    runtime.shutdown()
    forget()


def _at_exit() -> None:
    # A script that has failed does not wait for ranks that may wait for it.
    if not hasattr(sys, "last_value"):
        shutdown()
