# All calls to Spark. They are the same for a session in this process and for Spark Connect.
# Touches pyspark, and a thread for each Spark job that holds slots.
"""`active()` finds the session, `slots()` counts its slots, `SlotJob` is a Spark job whose tasks hold slots."""

from __future__ import annotations

import contextlib
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from pyspark.sql import SparkSession

from farandole.bindings.private import spark_names
from farandole.launch.agent_connection import package_place
from farandole.spark.task import TaskSettings

NO_SESSION = "there is no Spark session: make one first, for example with SparkSession.builder.getOrCreate()"
CHECK_SECONDS = 0.2  # between two checks of the number of executors
REGISTER_SECONDS = 30.0  # how long we wait for more executors; Spark itself waits as long
RELEASE_SECONDS = 10.0  # tasks have this long to end after they are dismissed; then Spark cancels them
CANCEL_SECONDS = 10.0  # a cancelled Spark job has this long to end
LOCAL = re.compile(r"local(?:\[(\d+|\*)(?:,\s*\d+)?\])?")


def active() -> Any:
    """The session of this thread or process. Raises RuntimeError if there is none."""
    with contextlib.suppress(Exception):
        return SparkSession.active()
    with contextlib.suppress(Exception):
        context = spark_names.active_context()
        if context is not None:
            return SparkSession(context)
    raise RuntimeError(NO_SESSION)


def is_remote(spark: Any) -> bool:
    """Whether it is a session of Spark Connect. Then Spark runs in another process, maybe on another machine."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def conf(spark: Any, name: str) -> str | None:
    """A setting of Spark; None when it is not set."""
    try:
        value = spark.conf.get(name, None)
    except Exception:  # some servers do not show settings
        return None
    return None if value is None else str(value)


def is_local(spark: Any) -> bool:
    """Whether Spark runs in local mode: in one process on the driver's machine."""
    return LOCAL.fullmatch(conf(spark, "spark.master") or "") is not None


def default_parallelism(spark: Any) -> int:
    """Spark's default number of tasks. Raises ValueError if Spark does not report it."""
    if not is_remote(spark):
        return int(spark.sparkContext.defaultParallelism)
    found = conf(spark, "spark.default.parallelism")
    if found is not None and found.isdigit():
        return int(found)
    local = LOCAL.fullmatch(conf(spark, "spark.master") or "")
    if local is not None and (local.group(1) or "1").isdigit():
        return int(local.group(1) or 1)
    raise ValueError(
        "num_proc is not given, and Spark Connect does not report spark.default.parallelism: give num_proc"
    )


def slots(spark: Any) -> int | None:
    """How many tasks can run at a time on the present executors; None when Spark does not report it."""
    if is_remote(spark):
        local = LOCAL.fullmatch(conf(spark, "spark.master") or "")
        return int(local.group(1) or 1) if local is not None and (local.group(1) or "1").isdigit() else None
    return spark_names.task_slots(spark)


def check_slots(spark: Any, wanted: int, seconds: float) -> None:
    """Raises RuntimeError if so many tasks cannot run at a time: Spark's stage would wait for a long time."""
    deadline = time.monotonic() + (0.0 if is_local(spark) else min(seconds, REGISTER_SECONDS))
    while (found := slots(spark)) is not None and found < wanted:
        if time.monotonic() >= deadline:
            raise RuntimeError(
                f"num_proc={wanted}, but Spark has {found} slots (spark.master {conf(spark, 'spark.master')}, "
                f"{_each(spark)} for each task): add executors or cores, or ask for fewer"
            )
        time.sleep(CHECK_SECONDS)


def _each(spark: Any) -> str:
    cpus = f"{conf(spark, 'spark.task.cpus') or 1} CPU"
    gpus = conf(spark, "spark.task.resource.gpu.amount")
    return cpus if gpus is None else f"{cpus} and {gpus} GPU"


def check_fixed(spark: Any) -> None:
    """RuntimeError with dynamic allocation of executors: Spark has no barrier stages then."""
    if (conf(spark, "spark.dynamicAllocation.enabled") or "").lower() == "true":
        raise RuntimeError(
            "Spark starts no tasks together while spark.dynamicAllocation.enabled is true: set it to false, "
            "or use run_elastic"
        )


def new_tag() -> str:
    """A tag by which Spark jobs can be cancelled."""
    return f"farandole-{uuid.uuid4().hex}"


def interrupt(spark: Any, tag: str) -> None:
    """Cancels the Spark jobs with this tag."""
    with contextlib.suppress(Exception):  # the session may have ended
        spark.interruptTag(tag)


class SlotJob:
    """A Spark job whose tasks hold slots; `error` and `task_error` say how it ended. It is cancelled by its tag."""

    def __init__(self, spark: Any, count: int, settings: TaskSettings, barrier: bool, tag: str = "") -> None:
        self.error: Exception | None = None
        self.task_error = ""  # the error that a task reported
        self._spark = spark
        self._tag = tag or new_tag()
        self._work = (count, settings, barrier)
        self._thread = threading.Thread(target=self._run, name="farandole-spark-job", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return not self._thread.is_alive()

    def why(self) -> Exception | None:
        """Why it has ended; None while it runs, or when its tasks were dismissed."""
        if not self.over:
            return None
        if self.task_error:
            return RuntimeError(self.task_error)
        if self.error is not None:
            return RuntimeError(f"the Spark job of the ranks has failed: {_last_words(self.error)}")
        return RuntimeError("the Spark job of the ranks ended before the ranks started")

    def join(self, seconds: float) -> None:
        """Waits until it ends."""
        self._thread.join(max(0.0, seconds))

    def close(self, held: int) -> None:
        """Waits for its end if its tasks were dismissed; then cancels it, and Spark kills its tasks."""
        if held:
            self.join(RELEASE_SECONDS)
        if not self.over:
            interrupt(self._spark, self._tag)
            self.join(CANCEL_SECONDS)

    def _run(self) -> None:
        count, settings, barrier = self._work
        try:
            self._spark.addTag(self._tag)
            frame = self._spark.range(0, count, 1, count)
            rows = frame.mapInArrow(_body(settings, barrier), "task_error string", barrier=barrier).collect()
            self.task_error = next((row.task_error for row in rows if row.task_error), "")
        except Exception as error:
            self.error = error
        finally:
            with contextlib.suppress(Exception):
                self._spark.removeTag(self._tag)


def _body(settings: TaskSettings, barrier: bool) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """The function that Spark runs in each task. It is pickled with its code, so it can find the package itself."""
    path = package_place()
    fields = (settings.key, settings.addresses, settings.seconds, dict(settings.env), settings.executable)

    def body(batches: Iterator[Any]) -> Iterator[Any]:
        import os
        import sys

        import pyarrow

        for _ in batches:
            pass
        if os.path.isdir(os.path.join(path, "farandole")) and path not in sys.path:
            sys.path.insert(0, path)
        try:
            from farandole.spark import task
        except ImportError as error:
            where = f"{os.uname().nodename} ({sys.executable})"
            task_error = f"farandole cannot be imported by Spark's Python on {where}: {error}; install it there"
        else:
            task_error = task.attend(task.TaskSettings(*fields), barrier)
        yield pyarrow.RecordBatch.from_arrays([pyarrow.array([task_error])], names=["task_error"])

    return body


def _last_words(error: Exception) -> str:
    """The useful line from a long error of Spark."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception)\b", line) and not line.startswith("at ")]
    return (named or lines or [type(error).__name__])[-1][:500]
