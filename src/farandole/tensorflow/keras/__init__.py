# The binding to tf.keras: Horovod's names for Keras 3 on TensorFlow, and for tf_keras.
# Re-exports alone.
"""Stands where a script has `horovod.tensorflow.keras`."""

from __future__ import annotations

from ...groups import ProcessSet, global_process_set
from ...keras.values import allgather, broadcast, reducescatter
from ...reductions import Adasum, Average, Max, Min, Product, Sum
from ...runtime import (
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
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from .. import broadcast_object, broadcast_variables, cuda_built, init, rocm_built
from ..compression import Compression
from ..functions import allgather_object, broadcast_global_variables
from . import callbacks, elastic
from .optimizer import DistributedOptimizer, load_model
from .values import allreduce

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
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
