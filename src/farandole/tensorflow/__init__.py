# The public names of the TensorFlow binding: Horovod's names for TensorFlow, and some additional names.
# Only re-exports names.
"""Replaces `horovod.tensorflow` in scripts.

>>> import tensorflow as tf, farandole.tensorflow as hvd
>>> hvd.init()
>>> hvd.allreduce(tf.ones(3), op=hvd.Sum).numpy().tolist()
[1.0, 1.0, 1.0]
>>> hvd.shutdown()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..base.errors import HostsUpdatedInterrupt
from ..base.named import module_of
from ..bindings import common_names as _common
from ..bindings import errors as _errors
from ..bindings.common_names import *  # noqa: F403 - the names of every binding
from ..bindings.compat import check_extension, gpu_available, split_list
from ..bindings.compat import num_rank_is_power_2 as check_num_rank_power_of_2
from ..bindings.errors import *  # noqa: F403 - the errors of every binding
from ..operations.pending import chosen_op as handle_average_backwards_compatibility
from ..world.basics import shutdown
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
from .optimizer import DistributedOptimizer, _DistributedAdasumOptimizer, _DistributedOptimizer
from .tape import DistributedGradientTape, PartialDistributedGradientTape, _DistributedGradientTape
from .util import _cache, _executing_eagerly, _make_subgraph, refs_to_vars, vars_to_refs

__all__ = [
    "BroadcastGlobalVariablesHook",
    "Compression",
    "Compressor",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HostsUpdatedInterrupt",
    "LocalGradientAggregationHelper",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "_DistributedAdasumOptimizer",
    "_DistributedGradientTape",
    "_DistributedOptimizer",
    "_cache",
    "_executing_eagerly",
    "_make_subgraph",
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
    "check_extension",
    "check_num_rank_power_of_2",
    "cuda_built",
    "elastic",
    "gpu_available",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "handle_average_backwards_compatibility",
    "init",
    "join",
    "keras",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "refs_to_vars",
    "rocm_built",
    "shutdown",
    "size_op",
    "split_list",
    "vars_to_refs",
]
__all__ += _errors.__all__
__all__ += _common.__all__

# These need Keras, which TensorFlow itself loads only when it is used.
LATE = {"SyncBatchNormalization": ".sync_batch_norm", "elastic": "", "keras": "", "sync_batch_norm": ""}
# Internal names that other programs import from here.
LATE |= dict.fromkeys(("_allreduce", "_grouped_allreduce", "_grouped_reducescatter", "_reducescatter"), ".mpi_ops")


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
            return module_of(f".{name}", __name__)
        return getattr(module_of(LATE[name], __name__), name)
