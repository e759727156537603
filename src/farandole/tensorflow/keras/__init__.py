# The binding to tf.keras: Horovod's names for Keras 3 on TensorFlow, and for tf_keras.
# Only re-exports names.
"""Replaces `horovod.tensorflow.keras` in scripts."""

from __future__ import annotations

from ...bindings import common_names as _common
from ...bindings.common_names import *  # noqa: F403 - the names of every binding
from ...keras.values import allgather, broadcast, reducescatter
from ...world.basics import shutdown
from ..compression import Compression
from ..framework import cuda_built, rocm_built
from ..functions import (
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_variables,
)
from ..joining import init
from . import callbacks, elastic
from .optimizer import DistributedOptimizer, load_model
from .values import allreduce

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "cuda_built",
    "elastic",
    "init",
    "load_model",
    "reducescatter",
    "rocm_built",
    "shutdown",
]
__all__ += _common.__all__
