# Writes a DataFrame as Parquet files to a store, in Spark's executors: one file per partition and kind of row.
# Touches pyspark, pyarrow and the store.
"""`prepare` writes training and validation data in one pass, and remembers which data is written already."""

from __future__ import annotations

import contextlib
import secrets
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark import TaskContext
from pyspark.ml.functions import vector_to_array
from pyspark.sql import functions as F
from pyspark.sql import types as T

from .parquet import DataError, arrow_filesystem, check_names, not_numbers, pack
from .store import AbstractFilesystemStore, StoreError

GROUP_BYTES = 8 << 20  # the size of a row group: small enough to shuffle many, large enough for fast reads
SPLIT = "__farandole_validation"
TRAIN, VALIDATION, FAILED, BAD = "train", "validation", "failed", "bad"

_prepared: weakref.WeakKeyDictionary[Any, dict[Any, str]] = weakref.WeakKeyDictionary()
_written: list[tuple[AbstractFilesystemStore, str]] = []
_one_at_a_time: weakref.WeakKeyDictionary[Any, threading.Lock] = weakref.WeakKeyDictionary()
_changing = threading.Lock()


@dataclass(frozen=True)
class Wanted:
    """How data must be written."""

    store: AbstractFilesystemStore
    columns: tuple[str, ...]
    validation: Any  # a fraction of the rows, a column, or None
    seed: int
    files: int | None  # None: rows stay where they are
    double: bool  # whether vectors keep 64 bits
    raw: bool = False  # whether there may be texts and bytes, which a transformation turns into numbers

    @property
    def key(self) -> tuple[Any, ...]:
        """The key that written data must have to be used again."""
        split = self.seed if isinstance(self.validation, float) else None
        return self.store.prefix_path, self.columns, self.validation, split, self.files, self.double


def prepare(df: Any, wanted: Wanted) -> str:
    """Writes a DataFrame, unless it was written in this way before. Returns the number of the data set."""
    check_names(_names(wanted), df.columns, "the DataFrame")
    with _changing:
        one = _one_at_a_time.setdefault(df, threading.Lock())
    with one:  # several fits may use the same DataFrame at the same time
        known = _prepared.setdefault(df, {})
        index = known.get(wanted.key)
        if index is None or not wanted.store.exists(wanted.store.get_train_data_path(index)):
            index = secrets.token_hex(4)
            try:
                _write(_selected(df, wanted), wanted, index)
            except BaseException:
                _remove(wanted.store, index)
                raise
            known[wanted.key] = index
            _written.append((wanted.store, index))
    return index


def clear_training_cache() -> None:
    """Removes all data that this process has prepared."""
    while _written:
        _remove(*_written.pop())
    _prepared.clear()


def _remove(store: AbstractFilesystemStore, index: str) -> None:
    for path in (store.get_train_data_path(index), store.get_val_data_path(index)):
        store.remove(path)


def _names(wanted: Wanted) -> list[str]:
    return [*wanted.columns, *([wanted.validation] if isinstance(wanted.validation, str) else [])]


def is_vector(kind: Any) -> bool:
    """Whether a column holds MLlib's vectors."""
    return type(kind).__name__ == "VectorUDT"


def plain(name: str, kind: Any, double: bool) -> Any:
    """A column as numbers or arrays of numbers."""
    column = F.col(f"`{name}`")
    return vector_to_array(column, "float64" if double else "float32").alias(name) if is_vector(kind) else column


def _selected(df: Any, wanted: Wanted) -> Any:
    kinds = {field.name: field.dataType for field in df.schema.fields}
    for name in wanted.columns:
        _check_kind(name, kinds[name], wanted.raw)
    columns = [plain(name, kinds[name], wanted.double) for name in wanted.columns]
    split = F.lit(False)
    if isinstance(wanted.validation, float):
        split = F.rand(wanted.seed) < wanted.validation
    elif wanted.validation is not None:
        column, kind = F.col(f"`{wanted.validation}`"), kinds[wanted.validation]
        if not isinstance(kind, T.BooleanType | T.NumericType):
            raise DataError(f"validation column {wanted.validation!r} is of type {kind.simpleString()}: expected "
                            "a boolean or a number")  # fmt: skip
        split = F.coalesce(column.cast("double") > 0, F.lit(False))
    chosen = df.select(*columns, split.alias(SPLIT))
    return chosen if wanted.files is None else chosen.repartition(wanted.files)


def _check_kind(name: str, kind: Any, raw: bool) -> None:
    inner = kind
    while isinstance(inner, T.ArrayType):
        inner = inner.elementType
    allowed = isinstance(inner, T.NumericType | T.BooleanType) or is_vector(kind)
    if not (allowed or (raw and isinstance(kind, T.StringType | T.BinaryType))):
        raise DataError(not_numbers(name, kind.simpleString()))


def _write(df: Any, wanted: Wanted, index: str) -> None:
    store = wanted.store
    paths = {TRAIN: store.get_train_data_path(index), VALIDATION: store.get_val_data_path(index)}
    for path in paths.values():
        store.fs.makedirs(store.local(path), exist_ok=True)
    write = Files(store, paths)
    found = df.mapInArrow(write, "kind string, file string").collect()
    for row in found:
        if row["kind"] in (FAILED, BAD):
            if row["kind"] == BAD:
                raise DataError(row["file"])
            raise StoreError(f"an executor could not write to the store {store.prefix_path}: {row['file']}")
    good = {row["file"] for row in found}
    # If Spark ran a task twice, the file of the first run is not used.
    for path in paths.values():
        with contextlib.suppress(FileNotFoundError):  # in object stores an empty folder does not exist
            for file in store.fs.ls(store.local(path), detail=False):
                if str(file).rpartition("/")[2] not in good:
                    store.remove(str(file))


class Files:
    """Runs in an executor: writes the rows of one partition and reports the files."""

    def __init__(self, store: AbstractFilesystemStore, paths: dict[str, str]) -> None:
        self._store = store
        self._paths = paths

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """For mapInArrow."""
        task = TaskContext.get()
        name = f"part-{task.partitionId():05d}-{task.attemptNumber()}.parquet" if task else "part-00000-0.parquet"
        groups = {kind: Groups(self._store, f"{path}/{name}") for kind, path in self._paths.items()}
        try:
            for batch in batches:
                table = pa.Table.from_batches([batch])
                split = table.column(SPLIT)
                rows = table.drop_columns([SPLIT])
                groups[VALIDATION].add(rows.filter(split))
                groups[TRAIN].add(rows.filter(pa.compute.invert(split)))
            made = [(kind, name) for kind, group in groups.items() if group.close()]
        except DataError as error:
            made = [(BAD, str(error))]
        except Exception as error:  # drivers of fsspec have errors of their own
            made = [(FAILED, f"{type(error).__name__}: {error}")]
        yield _answer(made)


def _answer(rows: Sequence[tuple[str, str]]) -> pa.RecordBatch:
    kinds, files = [row[0] for row in rows], [row[1] for row in rows]
    return pa.record_batch([pa.array(kinds, pa.string()), pa.array(files, pa.string())], names=["kind", "file"])


class Groups:
    """One Parquet file with row groups of about equal size."""

    def __init__(self, store: AbstractFilesystemStore, path: str) -> None:
        self._store = store
        self._path = path
        self._waiting: list[pa.Table] = []
        self._writer: Any = None
        self._schema: Any = None

    def add(self, table: pa.Table) -> None:
        """Adds rows, and writes a group when there are enough."""
        if table.num_rows:
            self._waiting.append(table)
        if sum(one.nbytes for one in self._waiting) >= GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        table = pack(pa.concat_tables(self._waiting), self._schema)
        self._waiting, self._schema = [], table.schema
        if self._writer is None:
            fs = arrow_filesystem(self._store.fs)
            path = self._store.local(self._path)
            # The numbers of a training set rarely repeat, so a dictionary would only cost time.
            self._writer = pq.ParquetWriter(path, table.schema, filesystem=fs, use_dictionary=False)
        self._writer.write_table(table, row_group_size=table.num_rows)

    def close(self) -> bool:
        """Whether there is a file."""
        if self._waiting:
            self._flush()
        if self._writer is not None:
            self._writer.close()
        return self._writer is not None
