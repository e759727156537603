# Every private name of pyspark, and of fsspec, that this package uses, and what happens without it.
# Touches objects of Spark's that it is given, and pyspark.
"""Names of pyspark's classes are looked for when this file is imported, others when they are used.

`_set` of a stage is for its author, as Spark's documentation of custom stages has it: functions stand for the others.
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


def look_at_stages() -> None:
    """For the names of estimators and models, which cost more to import."""
    find("pyspark.ml.param:Params._resetUid", *_UID)


def active_context() -> Any:
    """The context of this process where no session was made of it; None without one."""
    return None if _kind is None else of(_kind, "_active_spark_context", *_CONTEXT)


def task_slots(spark: Any) -> int | None:
    """How many tasks can run at a time, by the classes of Spark's JVM; None where they do not tell."""
    try:
        context = spark.sparkContext
        theirs: Any = context._jsc.sc() if has(context, "_jsc", *_SLOTS) else None
        return int(theirs.maxNumConcurrentTasks(theirs.resourceProfileManager().defaultResourceProfile()))
    except Exception:  # also a JVM that has other classes
        return None


def take_uid(stage: Any, uid: str) -> None:
    """A stage that was loaded is the one that was saved."""
    reset = of(stage, "_resetUid", *_UID)
    if reset is not None:
        reset(uid)


def local_path(filesystem: Any, path: str) -> str:
    """A path as the file system itself writes it; where fsspec does not tell, without what stands before "://"."""
    strip = of(filesystem, "_strip_protocol", *_PATH)
    return str(strip(path)) if strip is not None else path.rpartition("://")[2]
