# The newest tested and the oldest supported release of each framework, and the warning about newer ones.
# Touches modules that are already imported; imports none.
"""`TESTED` is the table, by major and minor number; a newer patch release causes no warning."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable

TESTED = {
    "torch": "2.15",
    "tensorflow": "2.21",
    "keras": "3.15",
    "jax": "0.10",
    "mxnet": "1.9",
    "lightning": "2.6",
    "pytorch_lightning": "2.6",
    "ray": "2.60",
    "pyspark": "4.3",
}

# The oldest release that each binding works with, as in pyproject.toml; an older one may still be installed.
OLDEST = {
    "torch": "2.9.1",
    "tensorflow": "2.21.0",
    "keras": "3.12.0",
    "jax": "0.10.0",
    "mxnet": "1.9.1",
    "lightning": "2.6.0",
    "pytorch_lightning": "2.6.0",
    "ray": "2.60.0",
    "pyspark": "4.0.0",
}

# The module whose import shows that a framework's binding is used. Executors on Ray and Spark call `warn_about_newer`
# themselves.
_BINDINGS = {
    "torch": "farandole.torch",
    "tensorflow": "farandole.tensorflow",
    "keras": "farandole.keras",
    "jax": "farandole.jax",
    "mxnet": "farandole.mxnet",
    "lightning": "farandole.lightning.environment",
    "pytorch_lightning": "farandole.lightning.environment",
}

_log = logging.getLogger("farandole")
_warned: set[str] = set()


def series(version: str) -> tuple[int, int]:
    """Major and minor number; zeros for a text that is not a version."""
    return _numbers(version)[:2]


def _numbers(version: str) -> tuple[int, int, int]:
    found = re.match(r"(\d+)(?:\.(\d+))?(?:\.(\d+))?", version)
    major, minor, patch = (int(part or 0) for part in found.groups()) if found else (0, 0, 0)
    return major, minor, patch


def newer_warning(name: str, version: str) -> str:
    """The warning about a version that is newer than the tested ones; otherwise an empty text."""
    if series(version) <= series(TESTED[name]):
        return ""
    return f"{name} {version} is newer than {TESTED[name]}, the newest release that farandole was tested with"


def too_old_error(name: str, version: str) -> str:
    """The error about a release that is too old for our binding; otherwise an empty text."""
    if _numbers(version) >= _numbers(OLDEST[name]):
        return ""
    return f"farandole works with {name} {OLDEST[name]} or newer: pip install --upgrade {name}"


def used() -> list[str]:
    """The frameworks whose bindings this process has imported."""
    return [name for name, module in _BINDINGS.items() if module in sys.modules]


def warn_about_newer(names: Iterable[str]) -> None:
    """Logs a warning, once per process, for each framework that is imported and newer than the tested releases."""
    for name in names:
        text = newer_warning(name, str(getattr(sys.modules.get(name), "__version__", "")))
        if text and name not in _warned:
            _warned.add(name)
            _log.warning("%s", text)
