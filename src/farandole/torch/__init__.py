# The public names of the PyTorch binding: Horovod's names for torch tensors, and some additional names.
# Only re-exports names. The first import is used before the others: without torch its error says what to install.
# ruff: noqa: E402
"""Replaces `horovod.torch` in scripts.

>>> import torch, farandole.torch as hvd
>>> hvd.init()
>>> hvd.allreduce(torch.ones(3), op=hvd.Sum)
tensor([1., 1., 1.])
>>> hvd.shutdown()
"""

from __future__ import annotations

from ..bindings.required import installed as _installed

_installed("torch", "PyTorch")

from ..base import hints as _hints
from ..base.errors import HostsUpdatedInterrupt
from ..bindings import common_names as _common
from ..bindings import errors as _errors
from ..bindings.common_names import *  # noqa: F403 - the names of every binding
from ..bindings.compat import check_extension
from ..bindings.errors import *  # noqa: F403 - the errors of every binding
from ..operations.pending import chosen_op as handle_average_backwards_compatibility
from ..world.basics import init, shutdown
from . import autograd as _autograd
from . import elastic
from . import ops as _ops
from .autograd import *  # noqa: F403 - the operations that autograd differentiates
from .compression import Compression, Compressor
from .ddp import Hosts, ddp_hook
from .functions import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from .helpers import WarmupLR, check_equal, cuda_built, device, rocm_built, scale_lr, set_seed
from .ops import *  # noqa: F403 - the others
from .optimizer import DistributedOptimizer
from .sync_batch_norm import SyncBatchNorm

_hints.watch_torch()  # also where torch does not know farandole: FARANDOLE_AUTOLOAD=0, or a checkout

__all__ = [
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "Hosts",
    "HostsUpdatedInterrupt",
    "SyncBatchNorm",
    "WarmupLR",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "check_equal",
    "check_extension",
    "cuda_built",
    "ddp_hook",
    "device",
    "elastic",
    "handle_average_backwards_compatibility",
    "init",
    "rocm_built",
    "scale_lr",
    "set_seed",
    "shutdown",
]
__all__ += _errors.__all__
__all__ += _common.__all__
__all__ += _autograd.__all__
__all__ += _ops.__all__
