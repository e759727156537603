# The public names of the MXNet binding: Horovod's names for MXNet's arrays, and some additional names.
# Only re-exports names. The first import is used before the others: without MXNet its error says what to install.
# ruff: noqa: E402
"""Replaces `horovod.mxnet` in scripts.

>>> import mxnet as mx, farandole.mxnet as hvd
>>> hvd.init()
>>> hvd.allreduce(mx.nd.ones(3), op=hvd.Sum).asnumpy().tolist()
[1.0, 1.0, 1.0]
>>> hvd.shutdown()
"""

from __future__ import annotations

from .framework import require as _require

_require()

from ..bindings import common_names as _common
from ..bindings import errors as _errors
from ..bindings.common_names import *  # noqa: F403 - the names of every binding
from ..bindings.compat import check_extension, split_list
from ..bindings.errors import *  # noqa: F403 - the errors of every binding
from ..world.basics import init, shutdown
from . import ops as _ops
from .compression import Compression, Compressor
from .framework import cuda_built, rocm_built
from .functions import allgather_object, broadcast_object, broadcast_parameters
from .ops import *  # noqa: F403 - the operations
from .optimizer import DistributedOptimizer, DistributedTrainer

__all__ = [
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "DistributedTrainer",
    "allgather_object",
    "broadcast_object",
    "broadcast_parameters",
    "check_extension",
    "cuda_built",
    "init",
    "rocm_built",
    "shutdown",
    "split_list",
]
__all__ += _errors.__all__
__all__ += _common.__all__
__all__ += _ops.__all__
