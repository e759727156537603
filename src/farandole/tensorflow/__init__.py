# The TensorFlow binding's face: Horovod's names for TensorFlow, and a few of our own.
# Re-exports alone.
"""Stands where a script has `horovod.tensorflow`.

>>> import tensorflow as tf, farandole.tensorflow as hvd
>>> hvd.init()
>>> hvd.allreduce(tf.ones(3), op=hvd.Sum).numpy().tolist()
[1.0, 1.0, 1.0]
>>> hvd.shutdown()
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..compat import num_rank_is_power_2 as check_num_rank_power_of_2
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
from ..pending import chosen_op as handle_average_backwards_compatibility
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
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from .aggregation import LocalGradientAggregationHelper
from .compression import Compression, Compressor
from .framework import cuda_built, rocm_built
from .functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from .joining import init
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
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    reducescatter,
    size_op,
)
from .optimizer import DistributedOptimizer
from .tape import DistributedGradientTape, PartialDistributedGradientTape

__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "Compressor",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "FarandoleTimeout",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "LocalGradientAggregationHelper",
    "Max",
    "Min",
    "Mismatch",
    "NotInitialized",
    "PartialDistributedGradientTape",
    "PeerLost",
    "ProcessSet",
    "Product",
    "Revoked",
    "ShutDown",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "check_num_rank_power_of_2",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "keras",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]

# These need Keras, which TensorFlow itself loads only when it is asked for.
LATE = {"SyncBatchNormalization": ".sync_batch_norm", "elastic": "", "keras": "", "sync_batch_norm": ""}


if TYPE_CHECKING:
    from . import elastic as elastic
    from . import keras as keras
    from . import sync_batch_norm as sync_batch_norm
    from .sync_batch_norm import SyncBatchNormalization
else:

    def __getattr__(name: str) -> Any:
        if name not in LATE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if not LATE[name]:
            return importlib.import_module(f".{name}", __name__)
        return getattr(importlib.import_module(LATE[name], __name__), name)
