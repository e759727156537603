# Bad input for estimators, in the driver of spark_cluster.py: each case gives the text of the error.
# Touches Spark, and stores, some of which do not exist.
"""`bad_input` runs all cases that need a session; `no_session` ends the session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import spark_estimator_cases as cases
from spark_estimator_cases import (
    RANKS,
    assembler,
    keras_estimator,
    lightning_estimator,
    plain_lightning_estimator,
    rows,
    shut_down,
    torch_estimator,
)


def bad_input(store_path: str) -> Any:
    """The error of each kind of bad input. None of them may leave a Spark job behind."""
    import keras
    import torch

    from farandole.spark.common.backend import SparkBackend
    from farandole.spark.common.store import Store

    good = assembler().transform(rows())
    wide, three = torch.nn.Linear(7, 1), torch.nn.Linear(4, 3)
    step = torch.optim.SGD(three.parameters(), lr=0.1)
    thrice = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    one_each = good.selectExpr("features", "array(y) as y")
    jobs = cases.spark.sparkContext.statusTracker().getActiveJobsIds
    before = set(jobs())  # the job of the shared ranks
    made: dict[str, Callable[[], Any]] = {
        "columns": lambda: torch_estimator(store_path, feature_cols=["featrues"]).fit(good),
        "shape": lambda: torch_estimator(
            store_path, model=wide, optimizer=torch.optim.SGD(wide.parameters(), lr=0.1)
        ).fit(good),
        "input_shapes": lambda: torch_estimator(store_path, input_shapes=[[-1, 5]]).fit(good),
        "label": lambda: torch_estimator(store_path, model=three, optimizer=step).fit(good),
        "label of arrays": lambda: torch_estimator(store_path, model=three, optimizer=step).fit(one_each),
        "label of lightning": lambda: plain_lightning_estimator(
            store_path, model=three, optimizer=step, validation=None, loss=torch.nn.functional.l1_loss
        ).fit(good),
        "label of keras": lambda: keras_estimator(store_path, model=thrice, validation=None).fit(one_each),
        "ragged": lambda: torch_estimator(store_path, feature_cols=["x"]).fit(
            cases.spark.createDataFrame([([1.0] * (3 + n % 2), 1.0) for n in range(8)], "x array<double>, y double")
        ),
        "text": lambda: torch_estimator(store_path, feature_cols=["x"]).fit(
            cases.spark.createDataFrame([("a", 1.0)], "x string, y double")
        ),
        "empty": lambda: torch_estimator(store_path).fit(good.where("y > 1000")),
        "few": lambda: torch_estimator(store_path).fit(good.limit(1)),
        "null label": lambda: torch_estimator(store_path, feature_cols=["x"]).fit(
            cases.spark.createDataFrame([(1.0, None if n == 3 else 1.0) for n in range(8)], "x double, y double")
        ),
        "store": lambda: torch_estimator("/proc/nowhere").fit(good),
        "private store": lambda: torch_estimator("memory://x").fit(good),
        "no store": lambda: torch_estimator(store_path).setStore(7).fit(good),
        "no parquet": lambda: torch_estimator(store_path, store=Store.create(store_path + "/other")).fit_on_parquet(),
        "slots": lambda: torch_estimator(store_path, backend=SparkBackend(30, start_timeout=1)).fit(good),
        "own step": lambda: plain_lightning_estimator(store_path, train_minibatch_fn=print).fit(good),
        "weights of losses": lambda: lightning_estimator(store_path, loss_weights=[1.0]).fit(good),
        "parameter": lambda: torch_estimator(store_path, epoch=3),
        "raises": lambda: torch_estimator(store_path, loss=lambda output, label: output.nonsense(), num_proc=RANKS).fit(
            good
        ),
    }
    found = {}
    for name, call in made.items():
        try:
            call()
            found[name] = "no error was raised"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    found["left"] = str(sorted(set(jobs()) - before))
    return found


def no_session(store_path: str) -> str:
    """The last case: ends the session."""
    estimator = torch_estimator(store_path)
    shut_down()
    cases.spark.stop()
    try:
        estimator.fit_on_parquet()
    except RuntimeError as error:
        return str(error)
    return "no error was raised"
