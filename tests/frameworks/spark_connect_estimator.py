# A client of Spark Connect that fits a KerasEstimator on TensorFlow: a process without Java.
# Touches the Spark Connect server that SPARK_REMOTE names, and the store that it is given.
"""`KERAS_BACKEND=tensorflow python spark_connect_estimator.py STORE`; what it found is the last line, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import spark_estimator_cases as cases
from pyspark.sql import SparkSession


def trained_without_spark(place: str, epochs: int) -> Any:
    """Plain TensorFlow on the same rows in the same order: the loss of a step is the mean of the ranks'."""
    import keras
    import tensorflow as tf

    estimator = cases.keras_estimator(place)
    model, optimizer = estimator.getModel(), keras.optimizers.SGD(0.1, momentum=0.9)
    parts = cases.readers(place, ["features", "y"])
    for epoch in range(epochs):
        for batches in zip(*(part.epoch(epoch) for part in parts), strict=True):
            with tf.GradientTape() as tape:
                errors = [model(one["features"])[:, 0] - one["y"].astype("float32") for one in batches]
                loss = sum(tf.reduce_mean(tf.square(one)) for one in errors) / len(parts)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return model


def main() -> None:
    """Fits, predicts, saves and loads."""
    import keras
    from pyspark.ml import Pipeline, PipelineModel

    place = sys.argv[1]
    spark = SparkSession.builder.getOrCreate()
    cases.use(spark)
    estimator = cases.keras_estimator(f"{place}/store", num_proc=cases.RANKS)
    fitted = Pipeline(stages=[cases.assembler(), estimator, cases.after()]).fit(cases.rows())
    expected = trained_without_spark(f"{place}/store", 2)
    trained: Any = fitted.stages[1]
    fitted.save(f"{place}/fitted")
    data = np.array([list(row)[:4] for row in cases.rows().orderBy("y").collect()], np.float32)
    found = {
        "session": type(spark).__module__,
        "backend": keras.backend.backend(),
        "weights": cases.weights_of(trained.getModel()),
        "expected": cases.weights_of(expected),
        "history": sorted(trained.getHistory()),
        "by_hand": [float(one) for one in expected.predict_on_batch(data)[:, 0]],
        **cases.described(PipelineModel.load(f"{place}/fitted").transform(cases.rows())),
    }
    spark.stop()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
