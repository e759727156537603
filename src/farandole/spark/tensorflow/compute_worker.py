# The program of a data service on Spark: python -m horovod.spark.tensorflow.compute_worker CONFIGFILE
# Touches runner.py and TensorFlow's compute_worker; its driver holds the service and writes the file.
"""A worker of tf.data's service in each slot of a Spark application, until the training job asks for the end."""

from __future__ import annotations

from pyspark.sql import SparkSession

# By their full names: the program runs under Horovod's name as well.
from farandole.operations.ops import barrier
from farandole.spark import session
from farandole.spark.runner import run
from farandole.tensorflow.data.compute_service import TfDataServiceConfig, compute_worker_fn
from farandole.tensorflow.data.compute_worker import check, parser, serving
from farandole.world import basics


def work(config: TfDataServiceConfig) -> None:
    """What each rank does."""
    compute_worker_fn(config)
    barrier()  # no rank leaves before all know that the service ends
    basics.shutdown()


def main() -> None:
    """The driver."""
    options = parser("Workers of a data service in the slots of a Spark application.")
    options.add_argument(
        "--num-proc", type=int, default=None, help="workers; spark.default.parallelism when it is not given"
    )
    asked = options.parse_args()
    spark = SparkSession.builder.getOrCreate()
    try:
        count = session.default_parallelism(spark) if asked.num_proc is None else asked.num_proc
        check(asked.dispatchers, count)
        with serving(count, asked.dispatchers, asked.dispatcher_side, asked.configfile, asked.timeout) as config:
            run(work, (config,), num_proc=count)
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
