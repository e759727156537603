# The public names of the Keras binding: Horovod's names for Keras 3 with any backend.
# Only re-exports names.
"""Replaces `horovod.keras` in scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..base.errors import HorovodInternalError, HostsUpdatedInterrupt
from ..base.named import module_of
from ..bindings import common_names as _common
from ..bindings.common_names import *  # noqa: F403 - the names of every binding
from ..operations.objects import allgather_object, broadcast_object
from ..world.basics import cuda_built, rocm_built, shutdown
from .compression import Compression
from .framework import check_installed
from .joining import init
from .models import load_model
from .optimizer import DistributedOptimizer, PartialDistributedOptimizer
from .values import allgather, allreduce, broadcast, broadcast_global_variables, broadcast_variables, reducescatter

check_installed()

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "PartialDistributedOptimizer",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "cuda_built",
    "elastic",
    "init",
    "load_model",
    "reducescatter",
    "rocm_built",
    "shutdown",
]
__all__ += _common.__all__

# Their classes derive from classes of Keras; scripts with tf_keras need only the rest of this package.
LATE = ("callbacks", "elastic")


if TYPE_CHECKING:
    from . import callbacks as callbacks
    from . import elastic as elastic
else:

    def __getattr__(name: str) -> Any:
        if name not in LATE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return module_of(f".{name}", __name__)
