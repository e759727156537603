# The public names of the PyTorch binding: Horovod's names for torch tensors, and some additional names.
# Re-exports alone.
"""Replaces `horovod.torch` in scripts.

>>> import torch, farandole.torch as hvd
>>> hvd.init()
>>> hvd.allreduce(torch.ones(3), op=hvd.Sum)
tensor([1., 1., 1.])
>>> hvd.shutdown()
"""

from __future__ import annotations

from ..base.errors import (
    FarandoleTimeout,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    Mismatch,
    NotInitialized,
    PeerLost,
    Revoked,
    ShutDown,
)
from ..bindings import face as _face
from ..bindings.compat import check_extension
from ..bindings.face import *  # noqa: F403 - the names of every binding
from ..operations.pending import chosen_op as handle_average_backwards_compatibility
from ..world.basics import init, shutdown
from . import elastic
from .autograd import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from .compression import Compression, Compressor
from .ddp import Hosts, ddp_hook
from .functions import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from .helpers import WarmupLR, check_equal, cuda_built, device, rocm_built, scale_lr, set_seed
from .ops import (
    allgather_async,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall_async,
    barrier,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather_async,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter_async,
    join,
    poll,
    reducescatter_async,
    sparse_allreduce_async,
    synchronize,
)
from .optimizer import DistributedOptimizer
from .sync_batch_norm import SyncBatchNorm

__all__ = [
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "FarandoleTimeout",
    "HorovodInternalError",
    "Hosts",
    "HostsUpdatedInterrupt",
    "Mismatch",
    "NotInitialized",
    "PeerLost",
    "Revoked",
    "ShutDown",
    "SyncBatchNorm",
    "WarmupLR",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "check_equal",
    "check_extension",
    "cuda_built",
    "ddp_hook",
    "device",
    "elastic",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "handle_average_backwards_compatibility",
    "init",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "rocm_built",
    "scale_lr",
    "set_seed",
    "shutdown",
    "sparse_allreduce_async",
    "synchronize",
]
__all__ += _face.__all__
