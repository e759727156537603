# The data that an estimator sends to its ranks, and the files that they write to the store while they train.
# Touches the store; does not use Spark.
"""A `Task` is the same for every rank. `Progress` writes for rank 0."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .parquet import Dataset
from .store import RemoteStore


@dataclass(frozen=True)
class Task:
    """The description of one fit."""

    remote: RemoteStore
    train: Dataset
    val: Dataset | None
    seed: int
    resume: bool  # whether to continue from the checkpoint of the run
    options: dict[str, Any]  # the estimator's parameters, except those in the payload
    payload: bytes  # model, optimizer and related objects, in one pickle

    @property
    def features(self) -> list[str]:
        """The columns of the model's inputs."""
        return list(self.options["feature_cols"])

    @property
    def labels(self) -> list[str]:
        """The columns with which its outputs are compared."""
        return list(self.options["label_cols"])


@dataclass(frozen=True)
class Result:
    """The result of rank 0: the trained weights in the framework's own format, and the history."""

    weights: bytes
    history: Any


class Progress:
    """Writes checkpoints and the history, and reports progress. Only rank 0 has one."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def checkpoint(self, data: bytes) -> None:
        """Replaces the run's checkpoint."""
        if self._task.remote.saving_runs:
            self._task.remote.store.write(self._task.remote.checkpoint_path, data)

    def note(self, history: Any, line: str) -> None:
        """Called at the end of an epoch."""
        remote = self._task.remote
        if remote.saving_runs:
            remote.store.write_text(f"{remote.logs_path}/history.json", json.dumps(history, default=str))
        if self._task.options["verbose"]:
            print(f"{remote.run_id}: {line}", flush=True)
