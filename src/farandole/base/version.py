# The package's version: from the checkout's VERSION file, or from the metadata of the installed package.
# Touches nothing.
"""`package_version()` is read when it is needed, because reading metadata is slow."""

from __future__ import annotations

import functools
from pathlib import Path

HOROVOD_VERSION = "0.28.1"  # the release whose interface is served under the name of Horovod


@functools.cache
def package_version() -> str:
    """The version as text.

    >>> package_version()[0].isdigit()
    True
    """
    package = Path(__file__).resolve().parents[1]
    checkout = package.parent.parent / "VERSION"
    # In a checkout, any installed metadata belongs to another installation.
    if package.parent.name == "src" and checkout.is_file():
        return checkout.read_text().strip()
    from importlib import metadata

    return metadata.version("farandole")
