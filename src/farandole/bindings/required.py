# Imports a framework that is installed and new enough; otherwise ImportError says what to install.
# Touches the import system.
"""A binding's `framework.py` calls `required` first; torch's binding calls `installed`."""

from __future__ import annotations

from typing import Any

from ..base import tested, tracebacks
from ..base.named import module_of
from .compat import is_version_greater_equal_than


def required(name: str, title: str) -> Any:
    """The framework's package. Raises ImportError if it is missing or too old."""
    framework = installed(name, title)
    if not is_version_greater_equal_than(framework.__version__, tested.OLDEST[name]):
        raise ImportError(f"{_needed(name, title)}; this is {framework.__version__}: pip install --upgrade {name}")
    return framework


def installed(name: str, title: str) -> Any:
    """The framework's package, of any version. Raises ImportError if it is missing."""
    try:
        return module_of(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise missing(
            f"{_needed(name, title)}, and it is not installed: pip install 'farandole[{name}]'", name
        ) from None


def missing(text: str, name: str) -> ImportError:
    """The error for a framework that is not installed. A rank prints it without our frames."""
    tracebacks.install_in_rank()
    return ImportError(text, name=name)


def _needed(name: str, title: str) -> str:
    return f"farandole.{name} needs {title} {tested.OLDEST[name]} or newer"
