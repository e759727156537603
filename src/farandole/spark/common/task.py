# What an estimator sends to its ranks, and what they keep in the store while they train.
# Touches the store; knows nothing of Spark.
"""A `Task` is the same for every rank; `Progress` is rank 0's pen."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .parquet import Dataset
from .store import RemoteStore


@dataclass(frozen=True)
class Task:
    """One fit."""

    remote: RemoteStore
    train: Dataset
    val: Dataset | None
    seed: int
    resume: bool  # from the checkpoint of the run
    options: dict[str, Any]  # the estimator's parameters, without what is in the payload
    payload: bytes  # model, optimizer and so on, in one pickle

    @property
    def features(self) -> list[str]:
        """The model's inputs."""
        return list(self.options["feature_cols"])

    @property
    def labels(self) -> list[str]:
        """What its outputs are compared with."""
        return list(self.options["label_cols"])

    def module(self, rank: int, size: int) -> Any:
        """This rank's data."""
        from .datamodule import ParquetDataModule

        return (self.options["data_module"] or ParquetDataModule)(self, rank, size)


@dataclass(frozen=True)
class Result:
    """What rank 0 gives back: the trained weights in the framework's own format, and the history."""

    weights: bytes
    history: Any


class Progress:
    """Writes checkpoints and the history, and tells how it goes. Only rank 0 has one."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def checkpoint(self, data: bytes) -> None:
        """Replaces the run's checkpoint."""
        if self._task.remote.saving_runs:
            self._task.remote.store.write(self._task.remote.checkpoint_path, data)

    def note(self, history: Any, line: str) -> None:
        """At the end of an epoch."""
        remote = self._task.remote
        if remote.saving_runs:
            remote.store.write_text(f"{remote.logs_path}/history.json", json.dumps(history, default=str))
        if self._task.options["verbose"]:
            print(f"{remote.run_id}: {line}", flush=True)
