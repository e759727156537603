# Makes classes that derive from the user's optimizer class, and copies attributes between objects.
# Touches the rooms bindings.private and world.
"""The class of a distributed optimizer is made when it is needed; copies and pickles make it again."""

from __future__ import annotations

import functools
import numbers
from typing import Any

from ..bindings.private.torch_names import is_hook
from ..world.groups import ProcessSet, global_process_set
from ..world.runtime import runtime

# These belong to one object: a learning-rate scheduler wraps `step` on it, and gradients are not copied.
_OWN = ("step", "_gradients", "_should_synchronize", "_synchronized", "_for_scaler")


@functools.cache
def class_over(methods: Any, base: Any) -> Any:
    """The class of distributed optimizers for `base`, with the same name, which scripts and checkpoints know."""
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (methods, base), names)


def super_of(optimizer: Any, methods: type) -> Any:
    """The wrapped class's methods, also if other code has copied those of `methods` into its own class."""
    return super(methods, optimizer) if isinstance(optimizer, methods) else super(type(optimizer), optimizer)


def adopt(kind: Any, optimizer: Any) -> Any:
    """An object of class `kind` with the attributes of `optimizer`: they share parameters, state and hooks."""
    wrapped: Any = object.__new__(kind)
    wrapped.__dict__.update(optimizer.__dict__)
    wrapped.__dict__.pop("step", None)
    return wrapped


def state_of(optimizer: Any) -> dict[str, Any]:
    """What a copy or a pickle contains. Hooks belong to the script and are not copied."""
    return {key: value for key, value in optimizer.__dict__.items() if key not in _OWN and not is_hook(key)}


def checked_passes(passes: Any) -> int:
    """ValueError unless it is a number of backward passes."""
    if not isinstance(passes, numbers.Integral) or passes <= 0:
        raise ValueError(f"backward_passes_per_step must be > 0, and a whole number, not {passes!r}")
    return int(passes)


def registered(ranks: list[int] | None) -> ProcessSet:
    """The process set of this world with these ranks; None means all."""
    if ranks is None:
        return global_process_set
    return runtime.world.groups.find(ranks) or ProcessSet(ranks)
