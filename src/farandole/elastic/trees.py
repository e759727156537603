# The content of a checkpoint: turns trees of values and tensors into JSON and blocks of bytes, and back. No pickle.
# Touches safetensors and NumPy; frameworks register their tensors here.
"""`encode` and `decode`. `encode` raises an error for values of other types and names where it is."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .safetensors import TYPES, Block, Damaged

# NumPy before version 2 has no name `bool`.
_NAMES = {name: kind for name, (kind, _) in TYPES.items() if name == "bool" or hasattr(np, name)}
_DTYPES = {kind: np.dtype(name) for name, kind in _NAMES.items()}


@dataclass(frozen=True)
class Kind:
    """A kind of tensors: how to recognise one, and how to convert it to a block and back."""

    is_one: Callable[[Any], bool]
    to_block: Callable[[Any], Block]
    from_block: Callable[[Block], Any]


def _block_of_array(array: Any) -> Block:
    name = _NAMES.get(array.dtype.newbyteorder("<").name)
    if name is None:
        raise TypeError(f"arrays of dtype {array.dtype} cannot be written to a checkpoint")
    whole = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return Block(name, array.shape, whole.reshape(-1).view(np.uint8))


def _array_of_block(block: Block) -> Any:
    if block.dtype not in _DTYPES:
        raise Damaged(f"NumPy has no {block.dtype}")
    return block.data.copy().view(_DTYPES[block.dtype]).reshape(block.shape)


KINDS: dict[str, Kind] = {
    "array": Kind(lambda value: isinstance(value, np.ndarray), _block_of_array, _array_of_block),
    "scalar": Kind(
        lambda value: isinstance(value, np.generic),
        lambda value: _block_of_array(np.asarray(value)),
        lambda block: _array_of_block(block)[()],
    ),
}
_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def encode(value: Any, path: str, blocks: dict[str, Block]) -> Any:
    """The value in a form for JSON. Tensors are put into `blocks`; the key is their path in the tree."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is bytes:
        return ["bytes", base64.b64encode(value).decode()]
    if isinstance(value, dict):  # a state_dict may be a subclass of dict
        return ["dict", [[encode(k, path, blocks), encode(v, f"{path}.{k}", blocks)] for k, v in value.items()]]
    for name, make in _SEQUENCES.items():
        if type(value) is make:
            return [name, [encode(item, f"{path}.{index}", blocks) for index, item in enumerate(value)]]
    for name, kind in KINDS.items():
        if kind.is_one(value):
            unique = path
            while unique in blocks:
                unique += "'"
            blocks[unique] = kind.to_block(value)
            return [name, unique]
    raise TypeError(
        f"{path} is a {type(value).__name__}, which a checkpoint cannot hold: it takes None, numbers, texts, bytes, "
        "lists, tuples, sets, dictionaries and tensors"
    )


def decode(code: Any, blocks: dict[str, Block]) -> Any:
    """The original value of `encode`. Raises Damaged if `encode` did not make this code."""
    if code is None or isinstance(code, (bool, int, float, str)):
        return code
    if not (isinstance(code, list) and len(code) == 2 and isinstance(code[0], str)):
        raise Damaged("the tree of values is not one that Farandole has written")
    name, content = code
    try:
        if name == "bytes":
            return base64.b64decode(content, validate=True)
        if name == "dict":
            return {decode(key, blocks): decode(value, blocks) for key, value in content}
        if name in _SEQUENCES:
            return _SEQUENCES[name](decode(item, blocks) for item in content)
        if name in KINDS:
            return KINDS[name].from_block(blocks[content])
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        raise Damaged(f"the tree of values is damaged: {error}") from None
    raise Damaged(f"the checkpoint holds a value of kind {name!r}; import farandole.{name} before loading it")
