# The cases of test_spark_estimators.py, in a process of their own with a local Spark session.
# Touches Spark, the stores it is given, and the ranks that Spark runs.
"""A line of JSON asks for a case, a line of JSON answers; each case returns what a test compares."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Any

import numpy as np

ANSWER = "answer: "
RANKS = 2
spark: Any = None


def begin() -> None:
    """The session of all cases."""
    global spark
    from pyspark.sql import SparkSession

    made = SparkSession.builder.master("local[2]").appName("estimators")
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.warehouse.dir": os.path.join(os.environ["TMPDIR"], "warehouse"),
    }.items():
        made = made.config(name, value)
    spark = made.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")


def rows(count: int = 40, weight: bool = False) -> Any:
    """x0 .. x3 as columns of their own, y a sum of them, and a column that says which rows validate."""
    draw = np.random.default_rng(7).uniform(-1, 1, (count, 4)).round(3)
    made = [(*map(float, x), float(x @ [1, -2, 3, 0.5]), place % 5 == 0) for place, x in enumerate(draw)]
    names = "x0 double, x1 double, x2 double, x3 double, y double, held boolean"
    return spark.createDataFrame(made, names)


def linear(seed: int = 1) -> Any:
    import torch

    torch.manual_seed(seed)
    return torch.nn.Linear(4, 1)


def assembler() -> Any:
    from pyspark.ml.feature import VectorAssembler

    return VectorAssembler(inputCols=["x0", "x1", "x2", "x3"], outputCol="features")


def common(place: str, **more: Any) -> dict[str, Any]:
    from farandole.spark.common.store import Store

    return {
        "num_proc": RANKS,
        "store": Store.create(place),
        "feature_cols": ["features"],
        "label_cols": ["y"],
        "batch_size": 6,
        "epochs": 2,
        "random_seed": 11,
        "partitions_per_process": 2,
        "verbose": 0,
        **more,
    }


def torch_estimator(place: str, **more: Any) -> Any:
    import torch

    from farandole.spark.torch import TorchEstimator

    model = more.pop("model", None) or linear()
    made = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "loss": torch.nn.MSELoss(), **more}
    return TorchEstimator(model=model, **common(place, **made))


def readers(place: str, columns: list[str]) -> list[Any]:
    """The rows as the ranks of the last fit had them."""
    from farandole.spark.common.parquet import inspect
    from farandole.spark.common.reader import Reader
    from farandole.spark.common.store import Store

    store = Store.create(place)
    (path,) = [one for one in store.fs.ls(place, detail=False) if "train_data" in one]
    data = inspect(store, path, columns)
    return [Reader(store, data, 6, rank, RANKS, 11) for rank in range(RANKS)]


def trained_without_spark(place: str, epochs: int, model: Any, optimizer: Any) -> list[float]:
    """Plain torch in this process, on the same rows in the same order: a step's gradient is the mean of the ranks'."""
    import torch

    parts = readers(place, ["features", "y"])
    for epoch in range(epochs):
        for batches in zip(*(part.epoch(epoch) for part in parts), strict=True):
            optimizer.zero_grad()
            for batch in batches:
                target = torch.from_numpy(batch["y"]).float().reshape(-1, 1)
                loss = torch.nn.functional.mse_loss(model(torch.from_numpy(batch["features"]).float()), target)
                (loss / len(parts)).backward()
            optimizer.step()
    return flat(model)


def flat(model: Any) -> list[float]:
    return [float(x) for one in model.parameters() for x in one.detach().flatten()]


def predictions(frame: Any, name: str = "y__output") -> list[float]:
    found = [row[name] for row in frame.orderBy("y").collect()]
    return [float(one) if isinstance(one, float) else float(one[0]) for one in found]


def torch_in_a_pipeline(place: str, saved: str) -> Any:
    import torch
    from pyspark.ml import Pipeline, PipelineModel
    from pyspark.ml.evaluation import RegressionEvaluator
    from pyspark.ml.feature import SQLTransformer

    after = SQLTransformer(statement="SELECT *, y__output - y AS error FROM __THIS__")
    seen = torch.nn.functional.l1_loss
    estimator = torch_estimator(place, validation="held", metrics=[seen], epochs=3)
    pipeline = Pipeline(stages=[assembler(), estimator, after])
    pipeline.write().overwrite().save(f"{saved}/pipeline")
    fitted = Pipeline.load(f"{saved}/pipeline").fit(rows())
    model = fitted.stages[1]
    plain = linear()
    expected = trained_without_spark(place, 3, plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
    fitted.save(f"{saved}/fitted")
    again = PipelineModel.load(f"{saved}/fitted")
    made = fitted.transform(rows())
    return {
        "weights": flat(model.getModel()),
        "expected": expected,
        "history": model.getHistory(),
        "columns": made.columns,
        "predicted": predictions(made),
        "again": predictions(again.transform(rows())),
        "by_hand": sorted_by_y(plain),
        "rmse": RegressionEvaluator(labelCol="y", predictionCol="y__output").evaluate(made),
    }


def sorted_by_y(model: Any) -> list[float]:
    import torch

    values = np.array([list(row)[:5] for row in rows().orderBy("y").collect()], dtype=np.float32)
    with torch.no_grad():
        return [float(one) for one in model(torch.from_numpy(values[:, :4])).flatten()]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Spark prints is no answer
    begin()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        began = time.monotonic()
        try:
            found = (True, globals()[name](**arguments))
        except BaseException:
            found = (False, traceback.format_exc())
        print(f"{name}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
        answers.write(ANSWER + json.dumps(found) + "\n")
        answers.flush()
    spark.stop()


if __name__ == "__main__":
    main()
