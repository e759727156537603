# Whether Spark is here, and new enough.
# Touches the list of installed packages alone.
"""`check()` before anything imports pyspark: what is missing, and the command that brings it."""

from __future__ import annotations

import importlib.metadata

LEAST = 4
REMEDY = "pip install 'farandole[spark]'"
NAMES = ("pyspark", "pyspark-client", "pyspark-connect", "databricks-connect")  # each brings the module pyspark


def check() -> None:
    """ImportError unless a Spark that we work with is installed."""
    for name in NAMES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if name.startswith("pyspark") and int(version.partition(".")[0]) < LEAST:
            raise ImportError(f"farandole.spark needs Spark {LEAST} or newer, and this is {version}: {REMEDY}")
        return
    raise ImportError(f"farandole.spark needs Spark {LEAST} or newer, and there is none: {REMEDY}", name="pyspark")
