# init and shutdown for JAX: joins or leaves the job; the ranks agree how compiled functions call the engine.
# Touches the rooms bindings and world; the files compiled and failures.
"""`init` and `shutdown` replace `hvd.init()` and `hvd.shutdown()` of scripts."""

from __future__ import annotations

import atexit
import contextlib
import sys
from typing import Any

from ..bindings.compiled import join
from ..world import basics
from . import compiled
from .failures import forget, settle

_registered = False


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Joins the job. Without a launcher the world has one rank. A second call does nothing.

    With a new version of JAX the first call compiles its calls, which takes some seconds; FARANDOLE_JAX_OPS=callback
    avoids this. Arguments as in `farandole.init`.
    """
    global _registered
    if not basics.is_initialized():
        forget()  # errors of an earlier world
    join(compiled.prepare, comm, process_sets)
    if not _registered:
        _registered = True
        atexit.register(_at_exit)  # registered after the runtime's function, so that it runs first


def shutdown() -> None:
    """Leaves the job after the compiled functions that have begun are done."""
    if basics.is_initialized() and sys.exc_info()[0] is None:
        with contextlib.suppress(Exception):  # it has failed, and the script never used its result
            settle()
    basics.shutdown()
    forget()


def _at_exit() -> None:
    # A script that has failed does not wait for other ranks, which may wait for it.
    if not hasattr(sys, "last_value"):
        shutdown()
