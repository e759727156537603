# Names that other programs import from horovod.tensorflow.mpi_ops: the operations, and names behind them.
# Touches compat, ops, util and the package's public names.
"""Thin adapters: every call ends in the operations of this package."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from .. import tensorflow as _common
from ..bindings.compat import HorovodBasics, check_installed_version, gpu_available, num_rank_is_power_2
from ..operations.reductions import Sum
from ..world.groups import ProcessSet, global_process_set
from .compression import Compression
from .ops import allreduce, grouped_allreduce, grouped_reducescatter, reducescatter
from .util import _executing_eagerly as _executing_eagerly

_LATE = ("SyncBatchNormalization", "elastic", "keras")
__all__ = [
    *(name for name in _common.__all__ if name not in _LATE),
    "check_installed_version",
    "gpu_available",
    "num_rank_is_power_2",
]

# The same objects under this module's name, so that programs can import from either.
globals().update({name: getattr(_common, name) for name in _common.__all__ if name not in _LATE})

_basics = HorovodBasics()


def _normalize_name(name: str) -> str:
    """A valid name for a node."""
    return re.sub("[^a-zA-Z0-9]", "_", name)


def _allreduce(
    tensor: Any, name: str | None = None, op: Any = Sum, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    ignore_name_scope: bool = False, process_set: ProcessSet = global_process_set,
) -> Any:  # fmt: skip
    """The sum of all ranks' tensors, or another reduction with `op`."""
    return allreduce(
        tensor, None, "", "", Compression.none, op, prescale_factor, postscale_factor, name, process_set,
        ignore_name_scope,
    )  # fmt: skip


def _grouped_allreduce(
    tensors: Sequence[Any], name: str | None = None, op: Any = Sum, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, ignore_name_scope: bool = False, process_set: ProcessSet = global_process_set,
) -> list[Any]:  # fmt: skip
    """The sums of several tensors that become ready together, or other reductions with `op`."""
    return grouped_allreduce(
        tensors, None, "", "", Compression.none, op, prescale_factor, postscale_factor, process_set,
        ignore_name_scope, name,
    )  # fmt: skip


def _reducescatter(
    tensor: Any, name: str | None = None, op: Any = Sum, ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Any:  # fmt: skip
    """This rank's rows of the sum, or of another reduction with `op`."""
    return reducescatter(
        tensor, "", Compression.none, op, name, process_set, ignore_name_scope, prescale_factor, postscale_factor
    )


def _grouped_reducescatter(
    tensors: Sequence[Any], name: str | None = None, op: Any = Sum, ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> list[Any]:  # fmt: skip
    """This rank's rows of the sums of several tensors, or of other reductions with `op`."""
    return grouped_reducescatter(
        tensors, "", Compression.none, op, process_set, prescale_factor, postscale_factor, name
    )
