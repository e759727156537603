# Checks whether Spark is installed and new enough.
# Touches only the list of installed packages.
"""`check()` is called before pyspark is imported. Its error says what is missing, and the command that installs it."""

from __future__ import annotations

import importlib.metadata

OLDEST = 4
REMEDY = "pip install 'farandole[spark]'"
NAMES = ("pyspark", "pyspark-client", "pyspark-connect", "databricks-connect")  # each one installs pyspark


def check() -> None:
    """ImportError unless a supported version of Spark is installed."""
    for name in NAMES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if name.startswith("pyspark") and int(version.partition(".")[0]) < OLDEST:
            raise ImportError(f"farandole.spark needs Spark {OLDEST} or newer, and this is {version}: {REMEDY}")
        return
    raise ImportError(
        f"farandole.spark needs Spark {OLDEST} or newer, and it is not installed: {REMEDY}", name="pyspark"
    )
