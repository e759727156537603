# The Keras binding's face: Horovod's names for Keras 3, whatever its backend.
# Re-exports alone.
"""Stands where a script has `horovod.keras`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..errors import HorovodInternalError, HostsUpdatedInterrupt
from ..groups import ProcessSet, global_process_set
from ..objects import allgather_object, broadcast_object
from ..reductions import Adasum, Average, Max, Min, Product, Sum
from ..runtime import (
    add_process_set,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from .compression import Compression
from .framework import present
from .joining import init
from .models import load_model
from .optimizer import DistributedOptimizer, PartialDistributedOptimizer
from .values import allgather, allreduce, broadcast, broadcast_global_variables, broadcast_variables, reducescatter

present()

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]

# Their classes derive from Keras's own; scripts with tf_keras need the rest of this package alone.
LATE = ("callbacks", "elastic")


if TYPE_CHECKING:
    from . import callbacks as callbacks
    from . import elastic as elastic
else:

    def __getattr__(name: str) -> Any:
        if name not in LATE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return importlib.import_module(f".{name}", __name__)
