# Imports of modules whose names are known only at run time; scripts/house.py checks that no other file has any.
# Touches the import system.
"""All other imports are statements, which tools can follow; a late import is inside a function."""

from __future__ import annotations

import importlib
from typing import Any


def module_of(name: str, package: str | None = None) -> Any:
    """The module of this name: from a table of lazy names, or chosen by a user."""
    return importlib.import_module(name, package)
