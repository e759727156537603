# A client of Spark Connect that fits a KerasEstimator: a process without Java.
# Touches the Spark Connect server that SPARK_REMOTE names, and the store that it is given.
"""`KERAS_BACKEND=torch python spark_connect_estimator.py STORE`; what it found is the last line, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import spark_estimator_cases as cases
from pyspark.sql import SparkSession


def main() -> None:
    """Fits, predicts, saves and loads."""
    import torch
    from pyspark.ml import Pipeline, PipelineModel

    folder = sys.argv[1]
    spark = SparkSession.builder.getOrCreate()
    cases.use(spark)
    keras = cases.keras_module()
    estimator = cases.keras_estimator(f"{folder}/store", num_proc=cases.RANKS)
    fitted = Pipeline(stages=[cases.assembler(), estimator, cases.error_stage()]).fit(cases.rows())
    plain = cases.linear()
    by_hand = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    expected = cases.trained_without_spark(f"{folder}/store", 2, plain, by_hand)
    trained: Any = fitted.stages[1]
    fitted.save(f"{folder}/fitted")
    found = {
        "session": type(spark).__module__,
        "backend": keras.backend.backend() if keras.__name__ == "keras" else keras.__name__,
        "trained": type(trained.getModel()).__module__.partition(".")[0],
        "weights": cases.weights_in_order(trained.getModel()),
        "expected": expected,
        "history": sorted(trained.getHistory()),
        "by_hand": cases.model_outputs(plain),
        **cases.loaded_pipeline_output(PipelineModel.load(f"{folder}/fitted").transform(cases.rows())),
    }
    spark.stop()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
