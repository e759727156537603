# Every private name of JAX that this package uses, with what it is for and what happens without it.
# Touches JAX.
"""A primitive with an ordered effect can be made by private names alone: without one of them there is no binding."""

from __future__ import annotations

from typing import Any

from . import MISSING, find

_ORDER = "keeping collectives in the order of the program, also inside compiled functions"
_NO_BINDING = "`import farandole.jax` raises ImportError; collectives on NumPy arrays work"

_effects = find("jax._src:effects", _ORDER, _NO_BINDING)
_tokens = find("jax._src.dispatch:runtime_tokens", "forgetting collectives that have failed", _NO_BINDING)
_abstract_token = find("jax._src.core:abstract_token", _ORDER, _NO_BINDING)
_batching = find("jax.interpreters:batching", "collectives under vmap", _NO_BINDING)
_mlir = find("jax.interpreters:mlir", "calls of XLA", _NO_BINDING)
_callback = find("jax.interpreters.mlir:emit_python_callback", "callbacks where there is no compiler", _NO_BINDING)
_token_set = find("jax.interpreters.mlir:TokenSet", _ORDER, _NO_BINDING)


def parts(version: str) -> tuple[Any, Any, Any, Any, Any]:
    """Effects, tokens, the type of a token, batching and mlir; ImportError when this JAX has them elsewhere."""
    missing = [name for name in MISSING if name.startswith("jax")]
    if missing:
        raise ImportError(
            f"farandole.jax does not know JAX {version} (it has no {', '.join(missing)}): "
            "upgrade farandole, or take an older jax"
        )
    return _effects, _tokens, _abstract_token, _batching, _mlir
