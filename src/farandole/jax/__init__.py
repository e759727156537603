# The public names of the JAX binding: Horovod's names for JAX, which Horovod itself does not support.
# Only re-exports names.
"""Collectives on JAX's arrays and trees of arrays, at once and inside `jit`, `grad`, `vmap` and `scan`.

>>> import jax.numpy as jnp, farandole.jax as hvd
>>> hvd.init()
>>> hvd.allreduce({"w": jnp.ones(3)}, op=hvd.Sum)["w"].tolist()
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
from ..bindings.errors import *  # noqa: F403 - the errors of every binding
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
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "HostsUpdatedInterrupt",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_parameters",
    "cuda_built",
    "elastic",
    "grad",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "join",
    "reducescatter",
    "rocm_built",
    "shutdown",
    "translated",
    "value_and_grad",
]
__all__ += _errors.__all__
__all__ += _common.__all__


if TYPE_CHECKING:
    from . import elastic as elastic
else:

    def __getattr__(name: str) -> Any:
        if name != "elastic":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return module_of(".elastic", __name__)
