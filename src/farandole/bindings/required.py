# The import of a framework: it is present and new enough, or an ImportError says what to install.
# Touches the import system.
"""A binding's `framework.py` calls `required` first."""

from __future__ import annotations

from typing import Any

from ..base import tested
from ..base.named import module_of
from .compat import is_version_greater_equal_than


def required(name: str, title: str) -> Any:
    """The framework's package; ImportError if it is missing or too old."""
    needed = f"farandole.{name} needs {title} {tested.OLDEST[name]} or newer"
    try:
        framework = module_of(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ImportError(f"{needed}, and it is not installed: pip install {name}") from None
    if not is_version_greater_equal_than(framework.__version__, tested.OLDEST[name]):
        raise ImportError(f"{needed}; this is {framework.__version__}: pip install --upgrade {name}")
    return framework
