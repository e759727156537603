# Every private name of pyspark, and of fsspec, that this package uses, and what happens without it.
# Touches objects of Spark's that it is given, and pyspark.
"""Names of pyspark's classes are looked up when this file is imported, others when they are used.

Authors of stages may use `_set`, as Spark's documentation of custom stages says; functions replace all other names.
"""

from __future__ import annotations

from typing import Any

from . import find, has, of

_CONTEXT = (
    "finding a SparkContext of which no session was made",
    "a script with a SparkContext makes a SparkSession of it first",
)
_SLOTS = (
    "counting what Spark has room for",
    "a job that is too large waits for Spark, which says so itself after a while",
)
_UID = ("the uid of a stage that is loaded", "it gets a new one")
_PATH = ("writing a path as its file system does", "it is written without what stands before ://")

_kind = find("pyspark:SparkContext", "sessions in this process", "there are those of Spark Connect", expected=False)
if _kind is not None:
    of(_kind, "_active_spark_context", *_CONTEXT)


def look_up_stages() -> None:
    """Looks up the names of estimators and models, whose import takes longer."""
    find("pyspark.ml.param:Params._resetUid", *_UID)


def active_context() -> Any:
    """The context of this process if no session was made from it, or None."""
    return None if _kind is None else of(_kind, "_active_spark_context", *_CONTEXT)


def task_slots(spark: Any) -> int | None:
    """The number of tasks that can run at a time, from Spark's JVM; None if it does not report it."""
    try:
        context = spark.sparkContext
        theirs: Any = context._jsc.sc() if has(context, "_jsc", *_SLOTS) else None
        return int(theirs.maxNumConcurrentTasks(theirs.resourceProfileManager().defaultResourceProfile()))
    except Exception:  # also if a JVM has other classes
        return None


def take_uid(stage: Any, uid: str) -> None:
    """Gives a loaded stage the uid of the saved stage."""
    reset = of(stage, "_resetUid", *_UID)
    if reset is not None:
        reset(uid)


def local_path(filesystem: Any, path: str) -> str:
    """A path in the form of the file system; if fsspec does not tell it, the path without the part before "://"."""
    strip = of(filesystem, "_strip_protocol", *_PATH)
    return str(strip(path)) if strip is not None else path.rpartition("://")[2]
