# Every private name of JAX that this package uses, with what it is for and what happens without it.
# Touches JAX.
"""A primitive with an ordered effect needs private names: if one of them is missing, there is no binding.

Functions give access to data in the context of a lowering, so that callers know no private name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from . import MISSING, find

_ORDER = "keeping collectives in the order of the program, also inside compiled functions"
_NO_BINDING = "`import farandole.jax` raises ImportError; collectives on NumPy arrays work"

_effect = find("jax._src.effects:Effect", _ORDER, _NO_BINDING)
_allowed = [  # sets of effects that must allow ours
    find(f"jax._src.effects:{name}.add_type", _ORDER, _NO_BINDING)
    for name in (
        "ordered_effects",
        "lowerable_effects",
        "control_flow_allowed_effects",
        "custom_derivatives_allowed_effects",
        "remat_allowed_effects",
    )
]
_clear = find("jax._src.dispatch:runtime_tokens.clear", "forgetting collectives that have failed", _NO_BINDING)
_abstract_token = find("jax._src.core:abstract_token", _ORDER, _NO_BINDING)
_batchers = find("jax.interpreters.batching:primitive_batchers", "collectives under vmap", _NO_BINDING)
_lower = find("jax.interpreters.mlir:register_lowering", "calls from XLA programs into the engine", _NO_BINDING)
_callback = find(
    "jax.interpreters.mlir:emit_python_callback", "calls through Python where no C++ compiler is installed", _NO_BINDING
)
_token_set = find("jax.interpreters.mlir:TokenSet", _ORDER, _NO_BINDING)
for _name in ("get", "update_tokens"):
    find(f"jax.interpreters.mlir:TokenSet.{_name}", _ORDER, _NO_BINDING)
for _name in ("tokens_in", "set_tokens_out", "module_context", "avals_in", "avals_out"):
    find(f"jax.interpreters.mlir:LoweringRuleContext.{_name}", _ORDER, _NO_BINDING)
find("jax.interpreters.mlir:ModuleContext.platforms", "calls from XLA programs that run only on the CPU", _NO_BINDING)


def check(version: str) -> None:
    """Raises ImportError if this version of JAX lacks one of these names."""
    missing = [name for name in MISSING if name.startswith("jax")]
    if missing:
        raise ImportError(
            f"farandole.jax does not support JAX {version}: this JAX has no {', '.join(missing)}. "
            "Upgrade farandole, or install an older jax"
        )


Effect: Any = object if _effect is None else _effect


def keep_in_order(effect: type) -> None:
    """Effects of this class are ordered, and allowed wherever programs can have effects."""
    for allow in _allowed:
        allow(effect)


def forget_tokens() -> None:
    """After a failure: later calls do not depend on earlier ones."""
    _clear()


def set_batching_rule(primitive: Any, rule: Callable[..., Any]) -> None:
    """Sets the rule for vmap."""
    _batchers[primitive] = rule


def set_lowering_rule(primitive: Any, rule: Callable[..., Any]) -> None:
    """Sets the rule for compiling."""
    _lower(primitive, rule)


def runs_only_on_cpu(context: Any) -> bool:
    """Whether the program that is being compiled will run only on CPUs."""
    return bool(context.module_context.platforms == ("cpu",))


def token_of(context: Any, effect: Any) -> Any:
    """The token of the previous call."""
    return context.tokens_in.get(effect)


def set_token(context: Any, effect: Any, token: Any) -> None:
    """Sets the token that the next call gets."""
    context.set_tokens_out(context.tokens_in.update_tokens(_token_set({effect: token})))


def call_python(context: Any, callback: Callable[..., Any], token: Any, arrays: list[Any]) -> tuple[Any, Any]:
    """Adds a call of Python to the compiled program; gives its results and its token."""
    results, token, _ = _callback(
        context, callback, token, arrays, context.avals_in, context.avals_out, has_side_effect=True
    )
    return results, token


def with_token(context: Any) -> Any:
    """The context of a call that takes a token before its arrays and gives a token."""
    avals_in, avals_out = [_abstract_token, *context.avals_in], [_abstract_token, *context.avals_out]
    return dataclasses.replace(context, avals_in=avals_in, avals_out=avals_out)
