# Horovod's names that are the same in every binding: ranks and sizes, process sets, reductions, timelines.
# Only re-exports names of operations and world.
"""A binding imports all of them, lists them in its `__all__`, and adds its own."""

from __future__ import annotations

from ..operations.reductions import Adasum, Average, Max, Min, Product, Sum
from ..world.basics import (
    add_process_set,
    ccl_built,
    cross_rank,
    cross_size,
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
    size,
    start_timeline,
    stop_timeline,
)
from ..world.groups import ProcessSet, global_process_set

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "remove_process_set",
    "size",
    "start_timeline",
    "stop_timeline",
]
