# Names that other programs import from horovod._keras: functions that both of Horovod's Keras packages call.
# Touches optimizer, values and framework; for tf_keras, farandole.tensorflow.keras.
"""Thin adapters; `backend` and `keras` are the modules that Horovod's callers pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...world.groups import ProcessSet, global_process_set
from .. import values
from ..framework import require
from ..models import loaded
from ..optimizer import make


def create_distributed_optimizer(
    keras: Any, optimizer: Any, name: str | None, device_dense: str, device_sparse: str, compression: Any,
    sparse_as_dense: bool, gradient_predivide_factor: float, op: Any, backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False, groups: Any = None, process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:  # fmt: skip
    """A DistributedOptimizer for an optimizer of Keras 3 or tf_keras."""
    options = (
        compression, sparse_as_dense, gradient_predivide_factor, op, backward_passes_per_step,
        average_aggregated_gradients,
    )  # fmt: skip
    if isinstance(optimizer, require().optimizers.Optimizer):
        return make(optimizer, *options, groups, process_set, scale_local_gradients)
    from ...tensorflow.keras.optimizer import DistributedOptimizer as wrap  # only needed for tf_keras

    return wrap(optimizer, name, "", "", *options, 0, groups, process_set, scale_local_gradients)


def broadcast_global_variables(backend: Any, root_rank: int) -> None:
    """RuntimeError: there are no global variables."""
    values.broadcast_global_variables(root_rank)


def allreduce(
    backend: Any, value: Any, name: str | None, average: bool | None, prescale_factor: float, postscale_factor: float,
    op: Any, compression: Any,
) -> Any:  # fmt: skip
    """The reduction of all ranks' values."""
    return values.allreduce(value, name, average, prescale_factor, postscale_factor, op, compression)


def allgather(backend: Any, value: Any, name: str | None) -> Any:
    """The values of all ranks, concatenated along the first dimension."""
    return values.allgather(value, name)


def broadcast(backend: Any, value: Any, root_rank: int, name: str | None) -> Any:
    """The root's value on every rank."""
    return values.broadcast(value, root_rank, name)


def reducescatter(backend: Any, value: Any, name: str | None, op: Any) -> Any:
    """This rank's rows of the reduction."""
    return values.reducescatter(value, name, op)


def load_model(
    keras: Any, wrap_optimizer: Callable[[Any], Any], filepath: Any, custom_optimizers: Any, custom_objects: Any,
    legacy_opts: bool = False,
) -> Any:  # fmt: skip
    """A saved model. `wrap_optimizer` gets a function that makes its optimizer and gives one that makes the distributed
    one.
    """

    def distributed(optimizer: Any) -> Any:  # with its state
        return wrap_optimizer(lambda **_: optimizer)()

    return loaded(keras, filepath, custom_optimizers, custom_objects, distributed)
