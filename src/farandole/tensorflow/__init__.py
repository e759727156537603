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
