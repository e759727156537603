# The JAX binding's face: Horovod's names for JAX, which Horovod itself never had.
# Re-exports alone.
"""Collectives on JAX's arrays and trees of arrays, at once and inside `jit`, `grad`, `vmap` and `scan`.

>>> import jax.numpy as jnp, farandole.jax as hvd
>>> hvd.init()
>>> hvd.allreduce({"w": jnp.ones(3)}, op=hvd.Sum)["w"].tolist()
[1.0, 1.0, 1.0]
>>> hvd.shutdown()
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..errors import (
    FarandoleTimeout,
    HorovodInternalError,
    HostsUpdatedInterrupt,
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
from .compression import Compression, Compressor
from .failures import translated
from .framework import cuda_built, rocm_built
from .functions import allgather_object, broadcast_object, broadcast_parameters
from .joining import init, shutdown
from .ops import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    reducescatter,
)
from .training import DistributedOptimizer, grad, value_and_grad

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "FarandoleTimeout",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
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
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grad",
    "grouped_allgather",
    "grouped_allreduce",
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
    "translated",
    "value_and_grad",
]


if TYPE_CHECKING:
    from . import elastic as elastic
else:

    def __getattr__(name: str) -> Any:
        if name != "elastic":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return importlib.import_module(".elastic", __name__)
