# Which release of each framework was tested last, which is the oldest that works, and one line of the log for others.
# Looks at modules that are imported already; imports none and touches nothing else.
"""`TESTED` is the table, by major and minor number; newer patch releases are not reported."""

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

# The oldest release that each binding takes, as pyproject.toml tells pip; an older one may be installed all the same.
LEAST = {
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

# A framework's binding, by a module that those who use it import. Executors on Ray and Spark tell by themselves.
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
_told: set[str] = set()


def series(version: str) -> tuple[int, int]:
    """Major and minor number; zeros for what is no version."""
    return _numbers(version)[:2]


def _numbers(version: str) -> tuple[int, int, int]:
    found = re.match(r"(\d+)(?:\.(\d+))?(?:\.(\d+))?", version)
    major, minor, patch = (int(part or 0) for part in found.groups()) if found else (0, 0, 0)
    return major, minor, patch


def line(name: str, version: str) -> str:
    """What there is to say about this version of a framework; nothing if it was tested, or is older."""
    if series(version) <= series(TESTED[name]):
        return ""
    return f"{name} {version} is newer than {TESTED[name]}, the newest release that farandole was tested with"


def too_old(name: str, version: str) -> str:
    """What there is to say about a release older than our binding takes."""
    if _numbers(version) >= _numbers(LEAST[name]):
        return ""
    return f"farandole works with {name} {LEAST[name]} or newer: pip install --upgrade {name}"


def used() -> list[str]:
    """The frameworks whose bindings this process has imported."""
    return [name for name, module in _BINDINGS.items() if module in sys.modules]


def tell(names: Iterable[str]) -> None:
    """A line of the log for each of these that is imported and newer than what was tested; once in a process."""
    for name in names:
        text = line(name, str(getattr(sys.modules.get(name), "__version__", "")))
        if text and name not in _told:
            _told.add(name)
            _log.warning("%s", text)
