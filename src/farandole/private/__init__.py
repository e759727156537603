# Private names of frameworks, each found once: what it is for, and what happens where a release has it no more.
# Touches nothing but the import system. One file per framework stands beside this one, and no other uses such names.
"""`find("torch._C:name", purpose, without)` gives the object, or None with a warning that says what happens now.

What a framework keeps in its objects is found when it is used: `of(object, "_name", purpose, without)`.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class PrivateName:
    """A name that a framework promises to nobody."""

    path: str  # a module, a colon, and what is in it
    purpose: str  # what it is for
    without: str  # what happens where it is missing


FOUND: dict[str, PrivateName] = {}
MISSING: dict[str, PrivateName] = {}


_ABSENT = object()


def find(path: str, purpose: str, without: str, expected: bool = True) -> Any:
    """The object of this name, None where there is none; `expected=False`: some supported releases do not have it.

    Of a field that a class declares for its objects it is the declaration.
    """
    return _noted(PrivateName(path, purpose, without), _at(path), expected)


def of(owner: Any, attribute: str, purpose: str, without: str, expected: bool = True) -> Any:
    """The attribute of a module, a class or an object of the framework's; None where it has none."""
    kind = owner if isinstance(owner, type) else type(owner)
    place = f"{owner.__name__}:" if isinstance(owner, ModuleType) else f"{kind.__module__}:{kind.__qualname__}."
    return _noted(PrivateName(place + attribute, purpose, without), getattr(owner, attribute, _ABSENT), expected)


def has(owner: Any, attribute: str, purpose: str, without: str) -> bool:
    """Whether it is there, if only as None."""
    of(owner, attribute, purpose, without)
    return hasattr(owner, attribute)


def _noted(name: PrivateName, found: Any, expected: bool) -> Any:
    if found is not _ABSENT:
        FOUND[name.path] = name
        MISSING.pop(name.path, None)
        return found
    if expected and name.path not in MISSING:  # once is enough
        text = f"{name.path} is missing, which Farandole uses for {name.purpose}: {name.without}"
        warnings.warn(text, stacklevel=4)
    MISSING[name.path] = name
    return None


def _at(path: str) -> Any:
    module, _, attributes = path.partition(":")
    try:
        return functools.reduce(_attribute, attributes.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        return _ABSENT


def _attribute(owner: Any, name: str) -> Any:
    declared = getattr(owner, "__annotations__", {}) if isinstance(owner, type) else {}
    return declared[name] if name in declared and not hasattr(owner, name) else getattr(owner, name)
