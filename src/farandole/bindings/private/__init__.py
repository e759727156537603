# Private names of frameworks: each is found once, with its purpose and the effect if a release does not have it.
# Touches only the import system. Each framework has its file in this folder; other files use no private names.
"""`find("torch._C:name", purpose, without)` gives the object, or None with a warning about the effect.

Private attributes of objects are found when they are used: `of(object, "_name", purpose, without)`.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ...base.named import module_of


@dataclass(frozen=True)
class PrivateName:
    """A name that a framework may change in any release."""

    path: str  # a module, a colon, and the name in it
    purpose: str  # what it is for
    without: str  # what happens if it is missing


FOUND: dict[str, PrivateName] = {}
MISSING: dict[str, PrivateName] = {}


_ABSENT = object()


def find(path: str, purpose: str, without: str, expected: bool = True) -> Any:
    """The object with this name, or None. `expected=False`: some supported releases do not have it.

    For a field that a class declares for its objects, the result is the declaration.
    """
    return _noted(PrivateName(path, purpose, without), _at(path), expected)


def of(owner: Any, attribute: str, purpose: str, without: str, expected: bool = True) -> Any:
    """The attribute of a framework's module, class or object, or None."""
    kind = owner if isinstance(owner, type) else type(owner)
    owner_name = f"{owner.__name__}:" if isinstance(owner, ModuleType) else f"{kind.__module__}:{kind.__qualname__}."
    return _noted(PrivateName(owner_name + attribute, purpose, without), getattr(owner, attribute, _ABSENT), expected)


def has(owner: Any, attribute: str, purpose: str, without: str) -> bool:
    """Whether the attribute exists, even with the value None."""
    of(owner, attribute, purpose, without)
    return hasattr(owner, attribute)


def _noted(name: PrivateName, found: Any, expected: bool) -> Any:
    if found is not _ABSENT:
        FOUND[name.path] = name
        MISSING.pop(name.path, None)
        return found
    if expected and name.path not in MISSING:  # warns only once
        text = f"{name.path} is missing, which Farandole uses for {name.purpose}: {name.without}"
        warnings.warn(text, stacklevel=4)
    MISSING[name.path] = name
    return None


def _at(path: str) -> Any:
    module, _, attributes = path.partition(":")
    try:
        return functools.reduce(_attribute, attributes.split("."), module_of(module))
    except (ImportError, AttributeError):
        return _ABSENT


def _attribute(owner: Any, name: str) -> Any:
    declared = getattr(owner, "__annotations__", {}) if isinstance(owner, type) else {}
    return declared[name] if name in declared and not hasattr(owner, name) else getattr(owner, name)
