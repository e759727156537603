# Checks whether Ray is installed and new enough.
# Touches only the list of installed packages.
"""`check()` is called before Ray is imported. Its error says what is missing, and the command that installs it."""

from __future__ import annotations

import importlib.metadata

OLDEST = (2, 60)
REMEDY = "pip install 'farandole[ray]'"


def check() -> None:
    """ImportError unless a supported version of Ray is installed."""
    wanted = ".".join(map(str, OLDEST))
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(
            f"farandole.ray needs Ray {wanted} or newer, and it is not installed: {REMEDY}", name="ray"
        ) from None
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < OLDEST:
        raise ImportError(f"farandole.ray needs Ray {wanted} or newer, and this is {version}: {REMEDY}", name="ray")
