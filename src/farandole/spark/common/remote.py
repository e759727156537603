# The function that a rank runs, under Horovod's name: horovod.spark.{torch,keras,lightning}.remote.
# Touches constants and the estimator that it is given.
"""`RemoteTrainer(estimator, ...)` is the function that the estimator's backend runs in each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .constants import (
    BYTES_PER_GIB,
    CUSTOM_SPARSE,
    METRIC_PRINT_FREQUENCY,
    PETASTORM_HDFS_DRIVER,
    TOTAL_BUFFER_MEMORY_CAP_GIB,
)
from .task import Result, Task

__all__ = [
    "BYTES_PER_GIB",
    "CUSTOM_SPARSE",
    "METRIC_PRINT_FREQUENCY",
    "PETASTORM_HDFS_DRIVER",
    "TOTAL_BUFFER_MEMORY_CAP_GIB",
    "RemoteTrainer",
]


def RemoteTrainer(estimator: Any, *_: Any, **__: Any) -> Callable[[Task], Result | None]:
    """The estimator's training function. Horovod's other arguments are ignored: the task has their values."""
    work: Callable[[Task], Result | None] = estimator._work()
    return work
