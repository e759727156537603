"""The reader of Spark's estimators: seeded order, every row exactly once per epoch, nulls, vectors, arrays, windows.
Writes small Parquet files into a temporary folder and into fsspec's memory; starts no Spark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyspark")
pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402

from farandole.spark.common.parquet import Column, DataError, Dataset, decode, inspect, pack  # noqa: E402
from farandole.spark.common.reader import Reader, on_frames  # noqa: E402
from farandole.spark.common.store import Store  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def threads_of_arrow() -> Iterator[None]:
    """pyarrow starts its threads at the first use, and they stay: before a test is watched."""
    pa.compute.sum(pa.array([1, 2]))
    yield


@pytest.fixture
def in_memory() -> Iterator[str]:
    """A place that is no folder of this machine, so that pyarrow reads it through fsspec."""
    yield "memory://data-of-a-test"
    store = Store.create("memory://data-of-a-test")
    store.remove(store.prefix_path)


def write(folder: Path | str, files: int = 3, rows: int = 37, group: int = 10) -> tuple[Any, str]:
    store = Store.create(str(folder))
    path = store.get_train_data_path()
    store.fs.makedirs(store.local(path))
    for file in range(files):
        numbers = np.arange(rows) + 1000 * file
        table = pa.table({"id": numbers, "v": [[float(n), float(-n)] for n in numbers]})
        with store.fs.open(f"{store.local(path)}/part-{file}.parquet", "wb") as to:
            pq.write_table(table, to, row_group_size=group)
    return store, path


def ids(reader: Reader, epoch: int = 0) -> list[int]:
    return [int(one) for batch in reader.epoch(epoch) for one in batch["id"]]


def everything(files: int = 3, rows: int = 37) -> list[int]:
    return [file * 1000 + row for file in range(files) for row in range(rows)]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("batch", [1, 8, 200])
@pytest.mark.parametrize("window", [1, 400, 1 << 20])
def test_every_row_once_in_an_epoch(tmp_path: Path, size: int, batch: int, window: int) -> None:
    store, path = write(tmp_path)
    data = inspect(store, path, ["id", "v"])
    for epoch in (0, 1):
        readers = [Reader(store, data, batch, rank, size, 5, window_bytes=window) for rank in range(size)]
        parts = [list(reader.epoch(epoch)) for reader in readers]
        assert {len(part) for part in parts} == {len(readers[0])}  # the same number of steps on all ranks
        assert all(1 <= len(one["id"]) <= batch + 1 for part in parts for one in part)
        found = [int(n) for part in parts for one in part for n in one["id"]]
        assert sorted(found) == everything() and found != everything()
        for part in parts:
            for one in part:  # rows stay rows
                assert np.array_equal(one["v"], np.stack([one["id"], -one["id"]], axis=1))


@pytest.mark.parametrize("where", ["tmp_path", "in_memory"])
def test_the_order_is_that_of_the_seed(request: pytest.FixtureRequest, where: str) -> None:
    store, path = write(request.getfixturevalue(where))
    data = inspect(store, path, ["id"])
    first = ids(Reader(store, data, 8, seed=1))
    assert first == ids(Reader(store, data, 8, seed=1)) != ids(Reader(store, data, 8, seed=2))
    assert first != ids(Reader(store, data, 8, seed=1), 1)
    # Whoever reads it, the order is one: ranks take neighbouring parts.
    assert first == ids(Reader(store, data, 8, 0, 2, 1)) + ids(Reader(store, data, 8, 1, 2, 1))
    assert ids(Reader(store, data, 8, shuffle=False)) == everything()


def test_steps_of_the_user_continue_where_the_last_epoch_ended(tmp_path: Path) -> None:
    store, path = write(tmp_path)
    data = inspect(store, path, ["id"])
    whole = [one for turn in range(3) for one in ids(Reader(store, data, 8, seed=1), turn)]
    reader = Reader(store, data, 8, seed=1, steps=5)
    found = [one for epoch in range(7) for one in ids(reader, epoch)]
    assert found == whole[: 7 * 5 * 8] and len(reader) == 5


def test_short_epochs_read_each_window_once(tmp_path: Path) -> None:
    store, path = write(tmp_path, rows=40)
    data = inspect(store, path, ["id", "v"])
    windows = len(Reader(store, data, 5, seed=1, window_bytes=1).windows(0))
    seen: list[int] = []

    def count(columns: Any) -> Any:
        seen.append(len(columns["id"]))
        return columns

    reader = Reader(store, data, 5, seed=1, steps=1, window_bytes=1, transformation=count)
    found = [one for epoch in range(24) for one in ids(reader, epoch)]  # half a window each
    assert sorted(found) == everything(rows=40)
    assert windows == 12 and len(seen) == 12


@pytest.mark.parametrize("where", ["tmp_path", "in_memory"])
def test_rows_in_memory_are_read_once(request: pytest.FixtureRequest, where: str) -> None:
    store, path = write(request.getfixturevalue(where))
    reader = Reader(store, inspect(store, path, ["id"]), 8, seed=1, keep=True)
    first = ids(reader)
    store.remove(path)
    assert not store.exists(path)
    assert ids(reader) == first and sorted(ids(reader, 1)) == sorted(first)


def test_an_epoch_that_is_left_early_leaves_no_thread(tmp_path: Path) -> None:
    store, path = write(tmp_path)
    batches = Reader(store, inspect(store, path, ["id"]), 8, window_bytes=1).epoch(0)
    next(batches)
    batches.close()  # type: ignore[attr-defined]


def test_nulls_vectors_and_arrays(tmp_path: Path) -> None:
    vector = pa.struct([("type", pa.int8()), ("size", pa.int32()), ("indices", pa.list_(pa.int32())),
                        ("values", pa.list_(pa.float64()))])  # fmt: skip
    dense = {"type": 1, "size": None, "indices": None, "values": [1.0, 2.0, 3.0]}
    sparse = {"type": 0, "size": 3, "indices": [1], "values": [7.0]}
    table = pa.table(
        {
            "whole": pa.array([1, None, 3], pa.int32()),
            "real": pa.array([1.5, None, 2.5], pa.float32()),
            "yes": pa.array([True, None, False]),
            "list": pa.array([None, [1, 2], [3, 4]], pa.list_(pa.int64())),
            "matrix": pa.array([[[1.0, 2.0]], [[3.0, 4.0]], [[5.0, None]]]),
            "fixed": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int16(), 2)),
            "vector": pa.array([dense, sparse, None], vector),
            "price": pa.array([None, 1, 2], pa.decimal128(10, 2)),
        }
    )
    store = Store.create(f"file://{tmp_path}")
    pq.write_table(table, tmp_path / "one.parquet")
    data = inspect(store, str(tmp_path), table.schema.names)
    (found,) = Reader(store, data, 3, shuffle=False).epoch(0)
    nan = np.nan
    expected = {
        "whole": [1, nan, 3],
        "real": [1.5, nan, 2.5],
        "yes": [1, nan, 0],
        "list": [[nan, nan], [1, 2], [3, 4]],
        "matrix": [[[1, 2]], [[3, 4]], [[5, nan]]],
        "fixed": [[1, 2], [3, 4], [5, 6]],
        "vector": [[1, 2, 3], [0, 7, 0], [nan] * 3],
        "price": [nan, 1, 2],
    }
    for name, values in expected.items():
        assert np.array_equal(found[name], np.array(values), equal_nan=found[name].dtype.kind == "f"), name
    assert found["real"].dtype == np.float32 and found["fixed"].dtype == np.int16


def test_arrays_as_blocks_of_bytes(tmp_path: Path) -> None:
    values = [[1.0, 2.0], None, [3.0, None], [5.0, 6.0]]
    table = pa.table({"v": pa.array(values, pa.list_(pa.float32())), "n": [1, 2, 3, 4]})
    first = pack(table)
    assert first.schema.field("v").type == pa.binary(8) and pack(table, first.schema).schema == first.schema
    with pq.ParquetWriter(tmp_path / "one.parquet", first.schema) as writer:
        writer.write_table(first)
        writer.write_table(pack(table[2:], first.schema))
    store = Store.create(str(tmp_path))
    data = inspect(store, str(tmp_path), ["v", "n"])
    assert data.columns[0] == Column("v", "float32", (2,), 1)
    (found,) = Reader(store, data, 6, shuffle=False).epoch(0)
    nan = np.nan
    expected = [[1, 2], [nan, nan], [3, nan], [5, 6], [3, nan], [5, 6]]
    assert np.array_equal(found["v"], np.array(expected, np.float32), equal_nan=True)
    ragged = pa.table({"v": pa.array([[1.0], [2.0]], pa.list_(pa.float32())), "n": [1, 2]})
    with pytest.raises(DataError, match="different lengths"):
        pack(ragged, first.schema)
    pq.write_table(pack(ragged), tmp_path / "two.parquet")
    with pytest.raises(DataError, match="different lengths"):
        inspect(store, str(tmp_path), ["v", "n"])


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ([["a"], ["b"]], "column 'x' is of type string"),
        ([None, None], "column 'x'"),
        ([[1.0], [1.0, 2.0]], "column 'x'"),
        ([[1.0, 2.0], [1.0, 2.0, 3.0], [1.0]], "expected arrays of shape"),
    ],
)
def test_data_that_cannot_be_trained_on(tmp_path: Path, column: Any, message: str) -> None:
    store = Store.create(str(tmp_path))
    pq.write_table(pa.table({"x": column}), tmp_path / "one.parquet")
    with pytest.raises(DataError, match=message):
        list(Reader(store, inspect(store, str(tmp_path), ["x"]), 2).epoch(0))


def test_texts_and_bytes_for_a_transformation(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"t": ["a", "bcd", "ef"], "b": [b"\0", b"\1\0", b"\2"], "n": [0, 1, 2]}), tmp_path / "a.parquet"
    )
    store = Store.create(str(tmp_path))
    data = inspect(store, str(tmp_path), ["t", "b", "n"])
    assert data.columns[:2] == (Column("t", "object"), Column("b", "object"))

    def counted(frame: Any) -> Any:
        frame["t"] = [np.array([len(one)] * 2) for one in frame["t"]]
        return frame

    (found,) = Reader(store, data, 3, shuffle=False, transformation=on_frames(counted)).epoch(0)
    assert found["t"].tolist() == [[1, 1], [3, 3], [2, 2]] and found["t"].dtype.kind == "i"
    assert found["b"].tolist() == [b"\0", b"\1\0", b"\2"] and found["n"].tolist() == [0, 1, 2]


def test_missing_columns_and_too_few_rows(tmp_path: Path) -> None:
    store, path = write(tmp_path, 1, 3)
    with pytest.raises(DataError, match="no column 'y'; its columns are 'id', 'v'"):
        inspect(store, path, ["y"])
    with pytest.raises(DataError, match="there is no Parquet data"):
        inspect(store, str(tmp_path / "nowhere"), ["y"])
    with pytest.raises(DataError, match="3 rows are too few for 4 ranks"):
        Reader(store, inspect(store, path, ["id"]), 2, 0, 4)


def test_columns_of_no_rows() -> None:
    assert decode(pa.chunked_array([], pa.list_(pa.float32())), Column("x", "float32", (2,))).shape == (0, 2)
    assert Dataset((), (), 0).rows == 0


def test_a_transformation_of_data_frames() -> None:
    def change(frame: Any) -> Any:
        frame["twice"] = frame["a"] * 2
        frame["v"] = [one + 1 for one in frame["v"]]
        return frame

    made = on_frames(change, [("twice", np.float32, (1,), False)], ["b"])(
        {"a": np.arange(3, dtype=np.int16), "b": np.zeros(3), "v": np.zeros((3, 2), np.float32)}
    )
    assert sorted(made) == ["a", "twice", "v"] and made["a"].dtype == np.int16
    assert made["twice"].tolist() == [[0], [2], [4]] and made["v"].tolist() == [[1, 1]] * 3
    with pytest.raises(DataError, match="made 1 rows of 3"):
        on_frames(lambda frame: frame[:1])({"a": np.arange(3)})
