# Loaders that make batches of tensors from the rows of a reader: horovod.spark.data_loaders.pytorch_data_loaders.
# Touches torch, NumPy and farandole.data.
"""A reader is an iterable of dicts (or named tuples) of columns. Each dict may have any number of rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from ...data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader

Batch = dict[str, torch.Tensor]


def _columns(part: Any) -> dict[str, Any]:
    columns = part._asdict() if hasattr(part, "_asdict") else part
    return {name: np.asarray(values) for name, values in columns.items()}


def _rows(columns: dict[str, Any]) -> int:
    return len(next(iter(columns.values()), ()))


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _tensors(columns: dict[str, Any]) -> Batch:
    return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in columns.items()}


def _batches(parts: Iterable[Any], rows: int, window: int) -> Iterator[Batch]:
    """Batches of this many rows, the last one may be smaller; in random order within a window of rows."""
    waiting: list[dict[str, Any]] = []
    count = 0
    for part in itertools.chain(map(_columns, parts), [None]):
        if part is not None:
            waiting.append(part)
            count += _rows(part)
            if count < max(rows, window):
                continue
        if not count:
            continue
        rows_of_window = _joined(waiting)
        order = torch.randperm(count).numpy() if window else np.arange(count)
        rows_of_window = {name: values[order] for name, values in rows_of_window.items()}
        end = count if part is None else count - count % rows
        for start in range(0, end, rows):
            yield _tensors({name: values[start : min(start + rows, end)] for name, values in rows_of_window.items()})
        waiting = [{name: values[end:] for name, values in rows_of_window.items()}]
        count -= end


class _Loader(BaseDataLoader):
    """The options that all loaders have."""

    def __init__(self, batch_size: int, name: str, limit_step_per_epoch: int, verbose: bool) -> None:
        self.batch_size = batch_size
        self.name = name
        self.limit_step_per_epoch = limit_step_per_epoch
        self.verbose = verbose


class PytorchDataLoader(_Loader):
    """One pass over the reader."""

    def __init__(
        self, reader: Any, batch_size: int, shuffling_queue_capacity: int, name: str = "",
        limit_step_per_epoch: int = -1, verbose: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(batch_size, name, limit_step_per_epoch, verbose)
        self.reader = reader
        self.shuffling_queue_capacity = shuffling_queue_capacity

    def __len__(self) -> int:
        """The number of batches of a pass, if it has a limit."""
        if self.limit_step_per_epoch < 0:
            raise TypeError(f"the loader {self.name!r} has no limit_step_per_epoch, so it has no length")
        return self.limit_step_per_epoch

    def _iterate(self) -> Iterator[Batch]:
        batches = _batches(self._parts(), self.batch_size, self.shuffling_queue_capacity)
        return itertools.islice(batches, self.limit_step_per_epoch) if self.limit_step_per_epoch >= 0 else batches

    def _parts(self) -> Iterable[Any]:
        return self.reader  # type: ignore[no-any-return]


class PytorchAsyncDataLoader(AsyncDataLoaderMixin, PytorchDataLoader):
    """One pass over the reader, loaded ahead in a thread."""


class PytorchInfiniteDataLoader(PytorchDataLoader):
    """Repeats the reader. A pass ends only at its limit, and the next pass continues there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._endless: Iterator[Batch] | None = None

    def _parts(self) -> Iterable[Any]:
        while True:
            found = False
            for part in self.reader:
                found = True
                yield part
            if not found:
                raise ValueError(f"the reader of the loader {self.name!r} has no rows")

    def _iterate(self) -> Iterator[Batch]:
        if self._endless is None:
            self._endless = _batches(self._parts(), self.batch_size, self.shuffling_queue_capacity)
        return itertools.islice(self._endless, self.limit_step_per_epoch if self.limit_step_per_epoch >= 0 else None)


class PytorchInfiniteAsyncDataLoader(AsyncDataLoaderMixin, PytorchInfiniteDataLoader):
    """Repeats the reader; a thread loads ahead."""


class PytorchInmemDataLoader(_Loader):
    """Reads everything once, and returns it `num_epochs` times."""

    def __init__(
        self, reader: Any, batch_size: int, num_epochs: int, name: str = "", shuffle: bool = False,
        limit_step_per_epoch: int = -1, verbose: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(batch_size, name, limit_step_per_epoch, verbose)
        self.num_epochs = num_epochs
        self.shuffle = shuffle
        parts = [_columns(part) for part in reader]
        if not parts:
            raise ValueError(f"the reader of the loader {name!r} has no rows")
        self._whole = _joined(parts)
        self._epochs = 0

    def __len__(self) -> int:
        """Batches of an epoch."""
        steps = -(-_rows(self._whole) // self.batch_size)
        return steps if self.limit_step_per_epoch < 0 else min(steps, self.limit_step_per_epoch)

    def _iterate(self) -> Iterator[Batch]:
        if self._epochs >= self.num_epochs:
            raise ValueError(
                f"the loader {self.name!r} was made for {self.num_epochs} epochs, which have ended: make a new one"
            )
        self._epochs += 1
        rows = _rows(self._whole)
        return itertools.islice(_batches([self._whole], self.batch_size, rows if self.shuffle else 0), len(self))


class PytorchInmemAsyncDataLoader(AsyncDataLoaderMixin, PytorchInmemDataLoader):
    """Reads everything once; batches are made ahead in a thread."""
