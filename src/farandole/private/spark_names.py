# Every private name of pyspark, and of fsspec, that this package uses, and what happens without it.
# Touches objects of Spark's that it is given, and pyspark.
"""Functions stand for the names, so that callers know no private name.

`_set` of a stage is for its author, as Spark's documentation of custom stages has it; it is not listed.
"""

from __future__ import annotations

from typing import Any

from . import of


def active_context() -> Any:
    """The context of this process where no session was made of it; None without one.

    Where Spark has no such name, a script with a SparkContext makes a SparkSession of it first.
    """
    from pyspark import SparkContext

    return getattr(SparkContext, "_active_spark_context", None)


def task_slots(spark: Any) -> int | None:
    """How many tasks can run at a time, by the classes of Spark's JVM; None where they do not tell.

    A job that is too large then waits for Spark, which says so itself after a while.
    """
    try:
        context = spark.sparkContext._jsc.sc()
        return int(context.maxNumConcurrentTasks(context.resourceProfileManager().defaultResourceProfile()))
    except Exception:
        return None


def take_uid(stage: Any, uid: str) -> None:
    """A stage that was loaded is the one that was saved."""
    reset = of(stage, "_resetUid", "the uid of a stage that is loaded", "it gets a new one")
    if reset is not None:
        reset(uid)


def local_path(filesystem: Any, path: str) -> str:
    """A path as the file system itself writes it; where fsspec does not tell, without what stands before "://"."""
    strip = getattr(filesystem, "_strip_protocol", None)
    return str(strip(path)) if strip is not None else path.rpartition("://")[2]
