# The MXNet binding's face: Horovod's names for MXNet's arrays, and a few of our own.
# Re-exports alone.
"""Stands where a script has `horovod.mxnet`.

>>> import mxnet as mx, farandole.mxnet as hvd
>>> hvd.init()
>>> hvd.allreduce(mx.nd.ones(3), op=hvd.Sum).asnumpy().tolist()
[1.0, 1.0, 1.0]
>>> hvd.shutdown()
"""

from __future__ import annotations

from ..errors import (
    FarandoleTimeout,
    HorovodInternalError,
    Mismatch,
    NotInitialized,
    PeerLost,
    Revoked,
    ShutDown,
)
from ..groups import ProcessSet, global_process_set
from ..reductions import Adasum, Average, Max, Min, Product, Sum
from ..runtime import (
    add_process_set,
    ccl_built,
    cross_rank,
    cross_size,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
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
from .compression import Compression, Compressor
from .framework import cuda_built, rocm_built
from .functions import allgather_object, broadcast_object, broadcast_parameters
from .ops import (
    allgather,
    allreduce,
    allreduce_,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_reducescatter,
    join,
    reducescatter,
)
from .optimizer import DistributedOptimizer, DistributedTrainer

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "DistributedTrainer",
    "FarandoleTimeout",
    "HorovodInternalError",
    "Max",
    "Min",
    "Mismatch",
    "NotInitialized",
    "PeerLost",
    "ProcessSet",
    "Product",
    "Revoked",
    "ShutDown",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
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
