# A rank's share of a Parquet data set: in which order rows come, which of them are this rank's, and in which batches.
# Touches parquet.py, and one thread that reads ahead.
"""The order of an epoch is a function of the seed, the epoch and the files: ranks take neighbouring parts of it.

Row groups are put in a random order and cut into windows of some megabytes; the rows of a window are shuffled together.
A rank holds two windows in memory: the one it takes batches from and the one that is being read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .parquet import Array, Columns, DataError, Dataset, Piece, arrow_filesystem, load

WINDOW_BYTES = 32 << 20
Transformation = Callable[[Columns], Columns]


@dataclass(frozen=True)
class Window:
    """Row groups whose rows are shuffled together; `start` is the first row's position in the epoch."""

    number: int
    start: int
    rows: int
    pieces: tuple[Piece, ...]


@dataclass
class Reader:
    """Batches of this rank: `for batch in reader.epoch(0)`, each a dict of arrays.

    Every row comes exactly once in an epoch, to one rank. Ranks have equally many batches, of `batch_size` rows but for
    the last, which takes what is left. With `steps` an epoch has so many, and the next one continues where it ended.
    """

    store: Any
    dataset: Dataset
    batch_size: int
    rank: int = 0
    size: int = 1
    seed: int = 0
    shuffle: bool = True
    steps: int | None = None
    transformation: Transformation | None = None
    keep: bool = False  # all that was read stays in memory
    window_bytes: int = WINDOW_BYTES
    _kept: dict[Piece, Columns] = field(default_factory=dict)
    # The two windows: an epoch of so many steps ends in the middle of one, and the next begins there.
    _near: dict[tuple[Piece, ...], Columns] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.dataset.rows < self.size:
            raise DataError(f"{self.dataset.rows} rows are too few for {self.size} ranks: each needs at least one")
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size}: expected at least 1")

    @property
    def share(self) -> range:
        """This rank's positions in the order of an epoch."""
        rows = self.dataset.rows
        return range(self.rank * rows // self.size, (self.rank + 1) * rows // self.size)

    def __len__(self) -> int:
        """Batches of an epoch, the same on all ranks: the smallest share decides."""
        return self.steps or -(-(self.dataset.rows // self.size) // self.batch_size)

    def windows(self, turn: int) -> list[Window]:
        """One pass over the data, in its order."""
        pieces: Sequence[Piece] = self.dataset.pieces
        if self.shuffle:
            pieces = [pieces[index] for index in np.random.default_rng([self.seed, turn]).permutation(len(pieces))]
        made: list[Window] = []
        group: list[Piece] = []
        start = 0
        for index, piece in enumerate(pieces):
            group.append(piece)
            ends = index + 1 == len(pieces)
            if ends or sum(one.size for one in group) + pieces[index + 1].size > self.window_bytes:
                rows = sum(one.rows for one in group)
                made.append(Window(len(made), start, rows, tuple(group)))
                start += rows
                group = []
        return made

    def epoch(self, number: int) -> Iterator[Columns]:
        """The batches of an epoch."""
        sizes = [self.batch_size] * len(self)
        if self.steps is None:
            sizes[-1] = len(self.share) - self.batch_size * (len(self) - 1)
            yield from _cut(self._blocks(number, 0), sizes)
            return
        passed = number * self.steps * self.batch_size
        turn, skip = divmod(passed, len(self.share))
        yield from _cut(self._endless(turn, skip), sizes)

    def _endless(self, turn: int, skip: int) -> Iterator[tuple[Columns, Array]]:
        while True:
            yield from self._blocks(turn, skip)
            turn, skip = turn + 1, 0

    def _blocks(self, turn: int, skip: int) -> Iterator[tuple[Columns, Array]]:
        """Columns of a window, and which of its rows are ours, in order; the next window is read meanwhile."""
        first, last = self.share.start + skip, self.share.stop
        wanted = [one for one in self.windows(turn) if one.start < last and first < one.start + one.rows]
        with ThreadPoolExecutor(1, "farandole-reader") as pool:
            ahead = [pool.submit(self._read, window) for window in wanted[:1]]
            for index, window in enumerate(wanted):
                columns = ahead.pop().result()
                self._forget_all_but(wanted[index : index + 2])
                if index + 1 < len(wanted):
                    ahead.append(pool.submit(self._read, wanted[index + 1]))
                order = np.arange(window.rows)
                if self.shuffle:
                    order = np.random.default_rng([self.seed, turn, window.number]).permutation(window.rows)
                yield columns, order[max(0, first - window.start) : last - window.start]
                del columns

    def _read(self, window: Window) -> Columns:
        if window.pieces not in self._near:
            parts = [self._piece(piece) for piece in window.pieces]
            if len(parts) > 1:
                parts = [{name: np.concatenate([part[name] for part in parts]) for name in parts[0]}]
            self._near[window.pieces] = parts[0]
        return self._near[window.pieces]

    def _forget_all_but(self, windows: Sequence[Window]) -> None:
        for pieces in self._near.keys() - {window.pieces for window in windows}:
            del self._near[pieces]

    def _piece(self, piece: Piece) -> Columns:
        if piece in self._kept:
            return self._kept[piece]
        columns = load(arrow_filesystem(self.store.fs), piece, self.dataset.columns)
        if self.transformation is not None:
            columns = self.transformation(columns)
        if self.keep:
            self._kept[piece] = columns
        return columns


def _cut(blocks: Iterator[tuple[Columns, Array]], sizes: Sequence[int]) -> Iterator[Columns]:
    """Batches of the given sizes from blocks of any."""
    columns: Columns = {}
    order: Array = np.arange(0)
    for size in sizes:
        parts: list[Columns] = []
        need = size
        while need:
            if not len(order):
                columns, order = next(blocks)
            take, order = order[:need], order[need:]
            parts.append({name: values[take] for name, values in columns.items()})
            need -= len(take)
        yield parts[0] if len(parts) == 1 else {n: np.concatenate([part[n] for part in parts]) for n in parts[0]}


def _stacked(values: list[Any]) -> Array:
    """A column of a frame as an array; texts and bytes that were not turned into numbers stay as they are."""
    if any(isinstance(value, str | bytes) for value in values[:1]):
        return np.array(values, dtype=object)
    return np.stack(values)


def on_frames(fn: Callable[[Any], Any], edited: Any = None, removed: Any = None) -> Transformation:
    """The user's transformation_fn, from one pandas frame to another, for columns of arrays.

    `edited`: (name, NumPy type, shape, nullable) of fields that it makes; `removed`: names of those that go.
    """

    def transform(columns: Columns) -> Columns:
        import pandas

        frame = pandas.DataFrame({n: values if values.ndim == 1 else list(values) for n, values in columns.items()})
        rows, made = len(frame), fn(frame)
        if len(made) != rows:
            raise DataError(f"transformation_fn made {len(made)} rows of {rows}: it has to keep their number")
        found = {str(n): _stacked(made[n].to_list()) for n in made.columns if n not in (removed or ())}
        for name, dtype, shape, *_ in edited or ():
            found[name] = found[name].astype(dtype).reshape(rows, *(shape or ()))
        # Numbers without a declared type keep that of the data, so that pandas does not widen them.
        declared = {name for name, *_ in edited or ()}
        for name, values in found.items():
            if name in columns and name not in declared and values.dtype.kind == columns[name].dtype.kind:
                found[name] = values.astype(columns[name].dtype)
        return found

    return transform
