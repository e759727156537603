# Farandole on Spark: functions as ranks in the slots of a Spark application.
# Checks that pyspark is installed and new enough, then imports it.
"""`run`, `run_elastic`, `SparkExecutor`. See docs/spark.md."""

from __future__ import annotations

from farandole.spark.installed import check

check()

from farandole.spark.executor import SparkExecutor  # noqa: E402
from farandole.spark.runner import run, run_elastic  # noqa: E402

__all__ = ["SparkExecutor", "run", "run_elastic"]
