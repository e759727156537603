# Imports by a name that is known only when the program runs; scripts/house.py holds that nothing else does.
# Touches the import system.
"""Everything else is an ordinary import, inside a function where it shall be late: those can be followed."""

from __future__ import annotations

import importlib
from typing import Any


def module_of(name: str, package: str | None = None) -> Any:
    """The module of this name: a row of a table of lazy names, the framework that a script has chosen, a user's own."""
    return importlib.import_module(name, package)
