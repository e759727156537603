# Whether Ray is here, and new enough.
# Touches the list of installed packages alone.
"""`check()` before anything imports Ray: what is missing, and the command that brings it."""

from __future__ import annotations

import importlib.metadata

LEAST = (2, 60)
REMEDY = "pip install 'farandole[ray]'"


def check() -> None:
    """ImportError unless a Ray that we work with is installed."""
    wanted = ".".join(map(str, LEAST))
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(
            f"farandole.ray needs Ray {wanted} or newer, and there is none: {REMEDY}", name="ray"
        ) from None
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < LEAST:
        raise ImportError(f"farandole.ray needs Ray {wanted} or newer, and this is {version}: {REMEDY}", name="ray")
