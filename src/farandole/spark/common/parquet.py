# Parquet as arrays: what is in a folder of files, and the decoding of its columns to NumPy.
# Touches pyarrow.dataset; does not depend on Spark, on ranks or on the order of rows.
"""`inspect` reads only footers; `load` reads row groups: numbers, arrays of numbers, MLlib's vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.fs

Array = np.ndarray[Any, Any]
Columns = dict[str, Array]
BLOCK = b"farandole.dtype"  # metadata of a column whose values are blocks of bytes
VECTOR = {"type", "size", "indices", "values"}  # the fields of MLlib's VectorUDT


RAW = "object"  # what a column of texts or bytes is in NumPy: for transformation_fn alone


class DataError(ValueError):
    """The data is not what the estimator expects, or cannot be used for training."""


@dataclass(frozen=True)
class Column:
    """What a column holds: NumPy's name of the type, and the shape of one value, () for a number."""

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    nulls: int = 0


@dataclass(frozen=True)
class Piece:
    """A row group."""

    path: str
    index: int
    rows: int
    size: int  # bytes of its columns


@dataclass(frozen=True)
class Dataset:
    """Row groups in the order of their files' names, and the columns that are wanted of them."""

    pieces: tuple[Piece, ...]
    columns: tuple[Column, ...]
    rows: int


def arrow_filesystem(fs: Any) -> Any:
    """A file system of fsspec for pyarrow; local files are read by pyarrow itself."""
    names = fs.protocol
    if "file" in ([names] if isinstance(names, str) else names):
        return pyarrow.fs.LocalFileSystem()
    return pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(fs))


def inspect(store: Any, path: str, names: Sequence[str]) -> Dataset:
    """What there is under a path, from the footers and one row."""
    fs = arrow_filesystem(store.fs)
    try:
        found = pads.dataset(store.local(path), format="parquet", filesystem=fs)
    except FileNotFoundError:
        raise DataError(f"there is no Parquet data in {path}") from None
    if not found.files:
        raise DataError(f"there is no Parquet data in {path}")
    check_names(names, found.schema.names, path)
    pieces: list[Piece] = []
    nulls, values = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    for fragment in sorted(found.get_fragments(), key=lambda one: str(one.path)):
        footer = fragment.metadata
        for name in names:
            kinds = [schema.field(name).type for schema in (found.schema, fragment.physical_schema)]
            if kinds[0] != kinds[1] and any(map(pa.types.is_fixed_size_binary, kinds)):
                raise DataError(f"column {name!r}: its arrays are of different lengths, and training needs one")
        for index in range(footer.num_row_groups):
            group = footer.row_group(index)
            size = 0
            for leaf in map(group.column, range(group.num_columns)):
                name = leaf.path_in_schema.partition(".")[0]
                if name in nulls:
                    size += leaf.total_uncompressed_size
                    values[name] += leaf.num_values
                    nulls[name] += leaf.statistics.null_count if leaf.statistics is not None else 0
            if group.num_rows:
                pieces.append(Piece(fragment.path, index, group.num_rows, size))
    rows = sum(piece.rows for piece in pieces)
    columns = [_describe(found, name, nulls[name]) for name in names] if rows else []
    for column in columns:
        uneven = column.nulls == 0 and values[column.name] % rows
        if _is_list(found.schema.field(column.name).type) and uneven:
            raise DataError(f"column {column.name!r}: its arrays are of different lengths, and training needs one")
    return Dataset(tuple(pieces), tuple(columns), rows)


def pack(table: Any, schema: Any = None) -> Any:
    """A table whose columns of equally long arrays of floats are blocks of bytes: Parquet reads lists ten times slower.

    `schema`: that of the file, when it has rows already.
    """
    for index, field in enumerate(table.schema):
        kind = field.type
        known = None if schema is None else schema.field(index)
        if (
            not _is_list(kind)
            or not pa.types.is_floating(kind.value_type)
            or (known is not None and _is_list(known.type))
        ):
            continue
        array = table.column(index).combine_chunks()
        lengths = pc.list_value_length(array)
        least, most = pc.min(lengths).as_py(), pc.max(lengths).as_py()
        dtype = np.dtype(kind.value_type.to_pandas_dtype())
        if most is None and known is not None:  # nothing but nulls
            least = most = known.type.byte_width // dtype.itemsize
        width = (most or 0) * dtype.itemsize
        if least != most or not width or (known is not None and width != known.type.byte_width):
            if known is not None:
                raise DataError(f"column {field.name!r}: its arrays are of different lengths, and training needs one")
            continue
        made = np.full((len(array), most), np.nan, dtype)
        flat = pc.fill_null(array.flatten(), float("nan")).to_numpy(zero_copy_only=False)
        made[np.asarray(array.is_valid())] = flat.reshape(-1, most)
        valid = array.is_valid().buffers()[1] if array.null_count else None
        bytes_ = pa.Array.from_buffers(pa.binary(width), len(array), [valid, pa.py_buffer(made)])
        table = table.set_column(index, pa.field(field.name, pa.binary(width), metadata={BLOCK: str(dtype)}), bytes_)
    return table


def check_names(names: Sequence[str], known: Sequence[str], where: str) -> None:
    """Raises DataError if a column is missing."""
    missing = [name for name in names if name not in known]
    if missing:
        raise DataError(
            f"{where} has no column {', '.join(map(repr, missing))}; its columns are {', '.join(map(repr, known))}"
        )


def _describe(found: Any, name: str, nulls: int) -> Column:
    kind = found.schema.field(name).type
    shape: tuple[int, ...] = ()
    if _is_vector(kind):
        # The field `size` is the size of a sparse vector, and null for a dense one.
        vector = _first(found, name)
        size = vector["size"] if vector["type"] == 0 else len(vector["values"])
        return Column(name, "float64", (int(size),), 0)
    block = (found.schema.field(name).metadata or {}).get(BLOCK)
    if block is not None and pa.types.is_fixed_size_binary(kind):
        return Column(name, block.decode(), (kind.byte_width // np.dtype(block.decode()).itemsize,), nulls)
    value: Any = _first(found, name) if _is_list(kind) else None
    while _is_list(kind):
        shape += (len(value),)
        kind = kind.value_type
        if _is_list(kind) and not value:
            raise DataError(f"column {name!r}: its first value is empty, so the shape of the others is not known")
        value = value[0] if value else None
    if pa.types.is_decimal(kind):
        kind = pa.float64()
    if not shape and any(test(kind) for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary)):
        return Column(name, RAW, (), nulls)
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise DataError(not_numbers(name, str(kind)))
    whole = not pa.types.is_floating(kind)
    dtype = "float64" if whole and nulls else str(np.dtype(kind.to_pandas_dtype()))
    return Column(name, dtype, shape, nulls)


def not_numbers(name: str, kind: str) -> str:
    """What is wrong with a column."""
    return (
        f"column {name!r} is of type {kind}: estimators train on numbers, vectors and arrays of numbers; turn it into "
        "one of them first, e.g. with StringIndexer, or texts and bytes in transformation_fn"
    )


def _first(found: Any, name: str) -> Any:
    """The first value that is not null."""
    for batch in found.to_batches(columns=[name], batch_size=1024, filter=pads.field(name).is_valid()):
        if batch.num_rows:
            return batch.column(0)[0].as_py()
    raise DataError(f"column {name!r} holds nothing but nulls")


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_vector(kind: Any) -> bool:
    return bool(pa.types.is_struct(kind)) and {field.name for field in kind} == VECTOR


def load(fs: Any, piece: Piece, columns: Sequence[Column]) -> Columns:
    """The columns of a row group."""
    fragment = pads.ParquetFileFormat().make_fragment(piece.path, fs, row_groups=[piece.index])
    # The order of rows is that of the file; one thread, since the other ranks of the host read as well.
    table = fragment.to_table(columns=[column.name for column in columns], use_threads=False)
    return {column.name: decode(table.column(column.name), column) for column in columns}


def decode(values: Any, column: Column) -> Array:
    """A column of Arrow as an array of one value per row; nulls become NaN."""
    array = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    if isinstance(array, pa.ChunkedArray):  # it has no rows
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    made = _vectors(array, column) if _is_vector(array.type) else _values(array, column, column.shape)
    return np.ascontiguousarray(made, dtype=column.dtype)


def _blocks(array: Any, column: Column) -> Array:
    """Blocks of bytes as arrays, without a copy where there are no nulls."""
    width, dtype = column.shape[0] if len(column.shape) == 1 else 0, np.dtype(column.dtype)
    if array.type.byte_width != width * dtype.itemsize:
        raise DataError(
            f"column {column.name!r}: expected arrays of shape {column.shape}, found some of "
            f"{array.type.byte_width // dtype.itemsize} values"
        )
    flat: Array = np.frombuffer(array.buffers()[1], dtype, len(array) * width, array.offset * width * dtype.itemsize)
    made = flat.reshape(len(array), width)
    if array.null_count:
        made = np.where(np.asarray(array.is_valid())[:, None], made, np.nan).astype(dtype)
    return made


def _values(array: Any, column: Column, shape: tuple[int, ...]) -> Array:
    if pa.types.is_fixed_size_binary(array.type):
        return _blocks(array, column)
    if _is_list(array.type) != bool(shape):
        raise DataError(f"column {column.name!r}: expected values of shape {column.shape}, found {array.type}")
    if not shape:
        if pa.types.is_decimal(array.type) or (pa.types.is_boolean(array.type) and array.null_count):
            array = array.cast(pa.float64())
        return np.asarray(array.to_numpy(zero_copy_only=False))
    if array.null_count:
        filled = np.full((len(array), *shape), np.nan, column.dtype)
        filled[np.asarray(array.is_valid())] = _values(array.drop_null(), column, shape)
        return filled
    lengths = pc.list_value_length(array)
    if len(array) and (pc.min(lengths).as_py(), pc.max(lengths).as_py()) != (shape[0], shape[0]):
        raise DataError(
            f"column {column.name!r}: expected arrays of shape {column.shape}, found lengths from "
            f"{pc.min(lengths).as_py()} to {pc.max(lengths).as_py()}"
        )
    return _values(array.flatten(), column, shape[1:]).reshape(len(array), *shape)


def _vectors(array: Any, column: Column) -> Array:
    """MLlib's vectors as Spark writes them: dense ones have values alone, sparse ones indices and a size."""
    if not array.null_count and pc.all(pc.equal(array.field("type"), 1)).as_py():
        return _values(array.field("values"), column, column.shape)
    made = np.zeros((len(array), *column.shape), column.dtype)
    for row, value in enumerate(array.to_pylist()):
        if value is None:
            made[row] = np.nan
            continue
        size = value["size"] if value["type"] == 0 else len(value["values"])
        if (size,) != column.shape:
            raise DataError(f"column {column.name!r}: expected vectors of shape {column.shape}, found {size} values")
        made[row, value["indices"] if value["type"] == 0 else slice(None)] = value["values"]
    return made
