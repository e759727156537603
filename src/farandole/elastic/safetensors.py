# Writes and reads the safetensors format: a length, a JSON header, raw bytes. Pure: bytes in, bytes out.
# Touches only NumPy.
"""We implement this small format ourselves, to control every system call and allocation of a checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

LONGEST_HEADER = 100_000_000  # the same limit as in the safetensors library
_LENGTH_BYTES = 8
_ALIGNMENT = 8

# Element types: the name in NumPy or torch (or both), the name in the format, and the number of bytes.
TYPES = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "uint16": ("U16", 2),
    "int16": ("I16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "uint32": ("U32", 4),
    "int32": ("I32", 4),
    "float32": ("F32", 4),
    "uint64": ("U64", 8),
    "int64": ("I64", 8),
    "float64": ("F64", 8),
    "complex64": ("C64", 8),
}
ITEM_BYTES = dict(TYPES.values())


class Damaged(ValueError):
    """The data that was read is not the data that was written."""


@dataclass(frozen=True)
class Block:
    """A tensor: its type with the name of the format, its shape, its bytes (little-endian, row-major)."""

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


def header(blocks: Mapping[str, Block], metadata: Mapping[str, str]) -> bytes:
    """The bytes of the file before the first tensor."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, block in blocks.items():
        end = at + block.data.size
        entries[name] = {"dtype": block.dtype, "shape": list(block.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def pieces(blocks: Mapping[str, Block], metadata: Mapping[str, str]) -> Iterable[memoryview]:
    """The file in pieces. The bytes of tensors are not copied."""
    yield memoryview(header(blocks, metadata))
    for block in blocks.values():
        yield block.data.data


def parse(data: NDArray[np.uint8]) -> tuple[dict[str, Block], dict[str, str]]:
    """The tensors of a file as views of its bytes, and its metadata. Damaged says what is wrong."""
    if data.size < _LENGTH_BYTES:
        raise Damaged(f"{data.size} bytes are too few for a header")
    length = int.from_bytes(data[:_LENGTH_BYTES].tobytes(), "little")
    if length > min(LONGEST_HEADER, data.size - _LENGTH_BYTES):
        raise Damaged(f"the header claims {length} bytes in a file of {data.size}")
    try:
        entries = json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes())
    except (ValueError, RecursionError) as error:
        raise Damaged(f"the header is not JSON: {error}") from None
    if not isinstance(entries, dict):
        raise Damaged("the header is not a JSON object")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise Damaged("the header's metadata is not a table of texts")
    body = data[_LENGTH_BYTES + length :]
    spans = {name: _span(name, entry, body.size) for name, entry in entries.items()}
    at = 0
    for start, end in sorted((start, end) for _, _, start, end in spans.values()):
        if start != at:
            raise Damaged(f"tensors overlap or leave a hole at byte {at}")
        at = end
    if at != body.size:
        raise Damaged(f"the tensors end at byte {at}, the file at {body.size}")
    return {name: Block(kind, shape, body[start:end]) for name, (kind, shape, start, end) in spans.items()}, metadata


def _span(name: str, entry: Any, available: int) -> tuple[str, tuple[int, ...], int, int]:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise Damaged(f"tensor {name!r}: its entry must have dtype, shape and data_offsets, and nothing else")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in ITEM_BYTES:
        raise Damaged(f"tensor {name!r}: unknown dtype {str(kind)[:40]!r}")
    lists = isinstance(shape, list) and isinstance(offsets, list) and len(shape) <= 64 and len(offsets) == 2
    if not lists or not all(type(number) is int for number in (*shape, *offsets)):
        raise Damaged(f"tensor {name!r}: shape or data_offsets are not lists of whole numbers")
    start, end = offsets
    if min(*shape, *offsets) < 0 or not start <= end <= available:
        raise Damaged(f"tensor {name!r}: bytes {start} to {end} of {available}")
    if math.prod(shape) * ITEM_BYTES[kind] != end - start:
        raise Damaged(f"tensor {name!r}: {kind} {shape} does not fill {end - start} bytes")
    return kind, tuple(shape), start, end
