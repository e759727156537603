# Private names of frameworks, each found once: what it is for, and what happens where a release has it no more.
# Touches nothing but the import system; each framework's room lists its own names in its private_names.py.
"""`find("torch._C.name", purpose, without)` gives the object, or None with a warning that says what happens now."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PrivateName:
    """A name that a framework promises to nobody."""

    path: str  # the module and the attributes in it
    purpose: str  # what it is for
    without: str  # what happens where it is missing


FOUND: dict[str, PrivateName] = {}
MISSING: dict[str, PrivateName] = {}


def find(path: str, purpose: str, without: str, expected: bool = True) -> Any:
    """The object of this name, None where there is none; `expected=False`: some supported releases do not have it."""
    name = PrivateName(path, purpose, without)
    found = _at(path)
    (MISSING if found is None else FOUND)[path] = name
    if found is None and expected:
        framework = path.partition(".")[0]
        warnings.warn(
            f"this release of {framework} has no {path}, which Farandole uses for {purpose}: {without}", stacklevel=3
        )
    return found


def _at(path: str) -> Any:
    """Imports as much of the path as are modules; None unless all of it is there."""
    names = path.split(".")
    try:
        found: Any = importlib.import_module(names[0])
        for place, name in enumerate(names[1:], 1):
            if not hasattr(found, name):
                importlib.import_module(".".join(names[: place + 1]))
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return None
    return found
