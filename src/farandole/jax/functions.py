# Copies parameters and objects from one rank to all.
# Touches JAX, failures, ops and objects.
"""Scripts call these once before training, so that all ranks begin with the same values."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..engine.interface import NAMES
from ..operations import objects
from ..world.basics import rank
from ..world.groups import ProcessSet, global_process_set
from .failures import settle
from .framework import jax
from .ops import broadcast


def broadcast_parameters(params: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> Any:
    """The root's tree of arrays on every rank: parameters, an optimizer's state, random keys.

    JAX's arrays never change, so use the returned tree. Leaves that are not arrays are sent as objects.
    """
    leaves, shape = jax.tree.flatten(params)
    arrays = [index for index, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray))]
    sent = [_sendable(leaves[index]) for index in arrays]
    found = broadcast(sent, root_rank, "parameters", process_set)
    rest = [None if isinstance(leaf, (jax.Array, np.ndarray)) else leaf for leaf in leaves]
    if len(arrays) < len(leaves):
        rest = broadcast_object(rest, root_rank, "parameters.objects", process_set)
    for index, array in zip(arrays, found, strict=True):
        rest[index] = _received_as(array, leaves[index])
    return jax.tree.unflatten(shape, rest)


def broadcast_tree(tree: Any, root_rank: int = 0) -> Any:
    """The root's tree on every rank; the trees of other ranks are ignored."""
    is_root = rank() == root_rank
    kinds = broadcast_object(jax.tree.map(_kind_of, tree) if is_root else None, root_rank, "tree.shape")
    leaves, shape = jax.tree.flatten(kinds)
    leaves_to_send = (
        jax.tree.leaves(tree) if is_root else [one.like() if isinstance(one, _ArrayKind) else one for one in leaves]
    )
    arrays = [index for index, one in enumerate(leaves) if isinstance(one, _ArrayKind)]
    found = broadcast([_sendable(leaves_to_send[index]) for index in arrays], root_rank, "tree.arrays")
    for index, array in zip(arrays, found, strict=True):
        leaves[index] = _received_as(array, leaves_to_send[index])
    return jax.tree.unflatten(shape, leaves)


class _ArrayKind:
    """The kind of an array, without its values."""

    def __init__(self, array: Any) -> None:
        self.numpy = isinstance(array, np.ndarray)
        self.kind = jax.random.key_impl(array) if _is_key(array) else None
        data = array if self.kind is None else jax.random.key_data(array)
        self.shape, self.dtype = data.shape, np.dtype(data.dtype)

    def like(self) -> Any:
        """A new array of this kind."""
        data = np.zeros(self.shape, self.dtype)
        if self.numpy:
            return data
        return jax.numpy.asarray(data) if self.kind is None else jax.random.wrap_key_data(data, impl=self.kind)


def _kind_of(leaf: Any) -> Any:
    return _ArrayKind(leaf) if isinstance(leaf, (jax.Array, np.ndarray)) else leaf


def _is_key(array: Any) -> bool:
    return isinstance(array, jax.Array) and bool(jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key))


def _sendable(array: Any) -> Any:
    """The same values in a type that can be sent; as bytes for types that cannot (uint32, complex numbers, keys)."""
    if _is_key(array):
        array = jax.random.key_data(array)
    narrowed = isinstance(array, np.ndarray) and array.dtype.itemsize == 8 and not jax.config.jax_enable_x64
    if array.dtype.name in NAMES and not narrowed:
        return array
    return np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8)


def _received_as(array: Any, original: Any) -> Any:
    if _is_key(original):
        data = _received_as(array, jax.random.key_data(original))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(original))
    if array.dtype != original.dtype:
        array = np.asarray(array).view(original.dtype).reshape(original.shape)
    return np.array(array) if isinstance(original, np.ndarray) else jax.numpy.asarray(array)


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The root's object on every rank; objects of other ranks are ignored."""
    settle()
    return objects.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Every rank's object, in the order of ranks."""
    settle()
    return objects.allgather_object(obj, name, process_set)
