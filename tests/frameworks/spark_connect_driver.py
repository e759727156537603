# The client of the Spark Connect test: a process without Java that knows the server by its address alone.
# Touches the Spark Connect server that SPARK_REMOTE names.
"""`python spark_connect_driver.py`; what it found is printed."""

from __future__ import annotations

import io

from pyspark.sql import SparkSession
from spark_cases import place

import farandole.spark as hvd_spark

if __name__ == "__main__":
    spark = SparkSession.builder.getOrCreate()
    out = io.StringIO()
    found = hvd_spark.run(place, num_proc=2, stdout=out, stderr=out)
    print("kind:", type(spark).__module__)
    print("sums:", [one["sum"] for one in found], [one["rank"] for one in found])
    print("heard:", sorted(line for line in out.getvalue().splitlines() if "is here" in line))
    try:
        hvd_spark.run(place, num_proc=9)
    except RuntimeError as error:
        print("refused:", error)
    spark.stop()
