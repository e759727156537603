# The data of a rank: batches for training and validation.
# Touches reader.py; runs in the ranks.
"""`DataModule` is the interface of an estimator's `data_module`; `ParquetDataModule` reads the prepared data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .parquet import Columns, Dataset
from .reader import Reader, on_frames
from .task import Task


class DataModule:
    """The batches of a rank, as dicts of arrays. All ranks must have the same number of batches in an epoch."""

    def __init__(self, task: Task, rank: int, size: int) -> None:
        self.task, self.rank, self.size = task, rank, size

    @property
    def train_steps(self) -> int:
        """Batches of an epoch."""
        raise NotImplementedError

    @property
    def val_steps(self) -> int:
        """Batches of a validation; 0 when there is none."""
        raise NotImplementedError

    def train_data(self, epoch: int) -> Iterator[Columns]:
        """The batches of an epoch."""
        raise NotImplementedError

    def val_data(self) -> Iterator[Columns]:
        """The batches of a validation."""
        raise NotImplementedError


class ParquetDataModule(DataModule):
    """Reads this rank's rows from the store, one window at a time."""

    def __init__(self, task: Task, rank: int, size: int) -> None:
        super().__init__(task, rank, size)
        options = task.options
        self._train = self._reader(
            task.train, options["batch_size"], options["shuffle"], options["train_steps_per_epoch"]
        )
        rows = options["val_batch_size"] or options["batch_size"]
        steps = options["validation_steps_per_epoch"]
        self._val = None if task.val is None else self._reader(task.val, rows, False, steps)

    def _reader(self, dataset: Dataset, rows: int, shuffle: bool, steps: int | None) -> Reader:
        options = self.task.options
        fn: Any = options["transformation_fn"]
        edits = (options["transformation_edit_fields"], options["transformation_removed_fields"])
        return Reader(
            self.task.remote.store,
            dataset,
            rows,
            self.rank,
            self.size,
            self.task.seed,
            shuffle,
            steps,
            None if fn is None else on_frames(fn, *edits),
            bool(options["inmemory_cache_all"]),
        )

    @property
    def train_steps(self) -> int:
        """Batches of an epoch."""
        return len(self._train)

    @property
    def val_steps(self) -> int:
        """Batches of a validation; 0 when there is none."""
        return 0 if self._val is None else len(self._val)

    def train_data(self, epoch: int) -> Iterator[Columns]:
        """The batches of an epoch."""
        return self._train.epoch(epoch)

    def val_data(self) -> Iterator[Columns]:
        """The batches of a validation, which are the same each time."""
        return iter(()) if self._val is None else self._val.epoch(0)


PetastormDataModule = ParquetDataModule  # Horovod's name: its class reads Parquet through Petastorm


def data_of(task: Task, rank: int, size: int) -> Any:
    """This rank's data."""
    return (task.options["data_module"] or ParquetDataModule)(task, rank, size)
