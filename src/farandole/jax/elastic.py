# Elastic training for JAX: trees of arrays as state, and a loop that recognizes errors from compiled functions.
# Touches JAX, elastic, compiled, failures and functions.
"""`JaxState` contains the state of training; `run` starts again from the last commit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ..base.errors import HorovodInternalError
from ..elastic import loop
from ..elastic.mirror import Sharded
from ..elastic.state import ObjectState, State
from ..world.basics import rank
from ..world.runtime import runtime
from . import compiled
from .failures import forget, translated
from .framework import jax
from .functions import broadcast_object, broadcast_tree

__all__ = ["JaxState", "ObjectState", "Sharded", "State", "run"]

_seen: Any = None  # the world in which functions were compiled


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates `func(state, ...)`: calls it again with the last commit when ranks were lost or added.

    This includes engine errors that JAX reports as its own because they happened inside a compiled function. Functions
    are compiled again in a new world, because their shapes and ranks may be different.
    """

    @functools.wraps(func)
    def with_our_errors(state: State, *args: Any, **kwargs: Any) -> Any:
        _enter_world()
        try:
            return func(state, *args, **kwargs)
        except HorovodInternalError:
            forget()  # a pending compiled step has failed with it
            raise
        except jax.errors.JaxRuntimeError as error:
            found = translated(error)
            if isinstance(found, HorovodInternalError):
                raise found from error
            raise

    return loop.run(with_our_errors)


def _enter_world() -> None:
    global _seen
    compiled.prepare()
    if _seen is not None and _seen is not runtime.world:
        forget()
        jax.clear_caches()
    _seen = runtime.world


class JaxState(ObjectState):
    """`JaxState(params=params, opt_state=opt_state, epoch=0)`: trees of arrays and plain values, as attributes."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(broadcast_object, rank, **kwargs)
        self.save()

    def save(self) -> None:
        """Keeps a copy in the memory of this rank's host; the arrays may be donated afterwards."""
        self._saved_state = {
            name: jax.tree.map(functools.partial(self._kept, name), getattr(self, name)) for name in self._names
        }

    def _kept(self, name: str, leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return self._copied(name, leaf)
        return _Key(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else _Array(leaf)

    def _given(self, name: str, leaf: Any) -> Any:
        if isinstance(leaf, _Key):
            return jax.random.wrap_key_data(jax.numpy.array(leaf.data), impl=leaf.kind)
        return jax.numpy.array(leaf.data) if isinstance(leaf, _Array) else self._copied(name, leaf)

    def restore(self) -> None:
        """Returns to the last copy."""
        copies = {
            name: jax.tree.map(functools.partial(self._given, name), value) for name, value in self._saved_state.items()
        }
        super().restore()
        for name, value in copies.items():
            setattr(self, name, value)

    def sync(self) -> None:
        """Copies the present arrays and values of rank 0 to every rank, and divides sharded values again."""
        commits = broadcast_object(self._commits, 0, "elastic.commits")
        # A new rank may have another tree, for example if a list grows.
        values = broadcast_tree({name: getattr(self, name) for name in self._names})
        for name, value in values.items():
            setattr(self, name, value)
        self._take_over(commits)

    def _saved_bytes(self) -> int:
        return sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(self._saved_state))

    def _saved_tree(self) -> dict[str, Any]:
        """The leaves of each attribute; the structure of the trees is not written."""
        return {name: [_plain(leaf) for leaf in jax.tree.leaves(value)] for name, value in self._saved_state.items()}

    def _load_tree(self, tree: dict[str, Any]) -> None:
        for name, leaves in tree.items():
            own, shape = jax.tree.flatten(getattr(self, name))
            if len(own) != len(leaves):
                raise ValueError(f"the checkpoint's {name} has {len(leaves)} leaves; this state's has {len(own)}")
            setattr(self, name, jax.tree.unflatten(shape, [_like(*pair) for pair in zip(leaves, own, strict=True)]))


class _Key:
    """Random keys, which NumPy does not know."""

    def __init__(self, key: Any) -> None:
        self.data, self.kind = np.array(jax.random.key_data(key)), jax.random.key_impl(key)


class _Array:
    """The values of a JAX array, marked so that they become a JAX array again."""

    def __init__(self, array: Any) -> None:
        self.data = np.array(array)
        self.nbytes = self.data.nbytes


def _plain(leaf: Any) -> Any:
    if not isinstance(leaf, (_Key, _Array)):
        return leaf
    # NumPy has no bfloat16, so its bits are written.
    return leaf.data.view(np.uint16) if leaf.data.dtype.name == "bfloat16" else leaf.data


def _like(leaf: Any, own: Any) -> Any:
    if not isinstance(own, jax.Array):
        return leaf
    if jax.dtypes.issubdtype(own.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jax.numpy.array(leaf), impl=jax.random.key_impl(own))
    if leaf.dtype == np.uint16 and own.dtype.name == "bfloat16":
        leaf = leaf.view(own.dtype)
    if (leaf.dtype, leaf.shape) != (own.dtype, own.shape):
        raise ValueError(f"the checkpoint has {leaf.dtype}{leaf.shape} where this state has {own.dtype}{own.shape}")
    return jax.numpy.array(leaf)
