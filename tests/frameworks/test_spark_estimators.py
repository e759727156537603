# Spark's estimators on a real cluster of two workers: each in a Pipeline, against training without Spark.
# Touches spark_cluster.py, whose process runs the cases of spark_estimator_cases.py, and spark_connect_estimator.py.
"""Fitting, saving, resuming, and the errors for bad input."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_cluster import HERE, ROOT
from spark_cluster import Application, missing

if why := missing():
    pytest.skip(why, allow_module_level=True)

# After a pipeline: of the data, the stage before the estimator, the model, and the stage behind it.
COLUMNS = ["x0", "x1", "x2", "x3", "y", "held", "features", "y__output", "error"]

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Application]:
    before = os.environ.get("KERAS_BACKEND")
    os.environ["KERAS_BACKEND"] = "torch"  # it starts in a fraction of TensorFlow's time
    try:
        made = Application(workers=2)
    finally:
        os.environ.pop("KERAS_BACKEND")
        if before is not None:
            os.environ["KERAS_BACKEND"] = before
    yield made
    try:
        ask(made, "shut_down")
    finally:
        made.close()


def ask(cluster: Application, case: str, **arguments: Any) -> Any:
    return cluster.ask("spark_estimator_cases.run_case", of=case, **arguments)


def near(found: list[float], expected: list[float]) -> bool:
    return found == pytest.approx(expected, rel=1e-5, abs=1e-6)


def expected_records(epochs: int, ranks: int = 2, name: str = "callback") -> list[str]:
    """The records of callbacks that each rank calls once in each epoch."""
    return [f"{name} rank {rank} epoch {epoch}" for rank in range(ranks) for epoch in range(epochs)]


def test_torch_in_a_pipeline(cluster: Application, tmp_path: Path) -> None:
    found = ask(cluster, "fit_torch_in_pipeline", store_path=str(tmp_path / "store"), saved=str(tmp_path))
    assert near(found["weights"], found["expected"])
    assert found["columns"] == COLUMNS
    assert near(found["predicted"], found["by_hand"]) and found["again"] == found["predicted"]
    assert found["written"] == found["rows"] and [len(part) for part in found["rows"]] == [32, 8]
    losses = [[one["train"]["loss"], one["validation"]["loss"]] for one in found["history"]]
    assert len(losses) == 3 and losses[2][0] < losses[0][0] and losses[1][1] < losses[0][1]
    assert all(0 < one["train"]["all_metrics"][0][0] < 10 for one in found["history"]) and found["rmse"] < 4


def test_lightning_in_a_pipeline(cluster: Application, tmp_path: Path) -> None:
    found = ask(cluster, "fit_in_pipeline", store_path=str(tmp_path / "store"), saved=str(tmp_path), kind="lightning")
    assert near(found["weights"], found["expected"]) and near(found["again"], found["by_hand"])
    assert found["columns"] == COLUMNS and [one["epoch"] for one in found["history"]] == [0, 1]
    assert found["records"] == [f"compressed by rank {rank}" for rank in (0, 1)] + expected_records(2)
    assert found["history"][1]["val_loss"] < found["history"][0]["val_loss"]


def test_keras_in_a_pipeline(cluster: Application, tmp_path: Path) -> None:
    found = ask(cluster, "fit_in_pipeline", store_path=str(tmp_path / "store"), saved=str(tmp_path), kind="keras")
    assert near(found["weights"], found["expected"]) and near(found["again"], found["by_hand"])
    assert found["columns"] == COLUMNS and sorted(found["history"]) == ["loss", "mae", "val_loss", "val_mae"]
    # Only rank 0 calls checkpoint_callback.
    assert found["records"] == expected_records(2) + expected_records(2, 1, "saved")
    assert found["history"]["val_loss"][1] < found["history"]["val_loss"][0]


@pytest.mark.parametrize("kind", ["plain", "lightning", "keras"])
def test_a_fit_continues_from_its_checkpoint(cluster: Application, tmp_path: Path, kind: str) -> None:
    found = ask(cluster, "resumed_fit", store_path=str(tmp_path / "store"), kind=kind)
    assert near(found["weights"], found["expected"])
    lengths = [len(one["loss"] if kind == "keras" else one) for one in found["histories"]]
    assert lengths == [1, 2]
    if kind == "plain":  # a plain module, in Lightning's Trainer
        names = {"epoch", "loss", "metric_0", "val_loss", "val_metric_0"}
        assert all(set(one) == names and 0 < one["metric_0"] < 10 for one in found["histories"][1])


def test_saved_estimators_parquet_and_resumed_runs(cluster: Application, tmp_path: Path) -> None:
    found = ask(cluster, "resumed_fit_on_parquet", store_path=str(tmp_path / "store"), saved=str(tmp_path))
    assert found["same"] == [True, 1, ["features"], 2]
    assert found["first"] == 1 and found["second"] == [0, 1, 2]
    assert near(found["weights"], found["expected"])
    assert found["files"] == [True, True] and found["checkpoints"] == 1
    assert found["records"] == expected_records(3)  # saved and loaded with the estimator; no epoch comes twice


def test_several_outputs_weights_nulls_and_a_transformation(cluster: Application, tmp_path: Path) -> None:
    found = ask(cluster, "several_outputs", store_path=f"file://{tmp_path}/store")
    assert found["losses"][2] < found["losses"][0] and len(found["validated"]) == 3
    assert found["kinds"] == ["float DenseVector 2"] and found["rows"] == 18
    train, held = found["written"]  # each row is in one of them
    assert train and held and sorted(train + held) == [n / 5 for n in range(24)]


@pytest.mark.parametrize("backend", ["torch", "tf_keras", pytest.param("tensorflow", marks=pytest.mark.nightly)])
def test_keras_through_spark_connect(cluster: Application, tmp_path: Path, backend: str) -> None:
    driver = str(HERE / "spark_connect_estimator.py")
    if backend == "tf_keras" and importlib.util.find_spec(backend) is None:
        pytest.skip("tf_keras is not installed")
    chosen = {"TF_USE_LEGACY_KERAS": "1"} if backend == "tf_keras" else {"KERAS_BACKEND": backend}
    output = cluster.run(driver, str(tmp_path), SPARK_REMOTE=cluster.remote, **chosen)
    found = json.loads(output.splitlines()[-1])
    assert found["trained"] == ("tf_keras" if backend == "tf_keras" else "keras")
    assert found["session"] == "pyspark.sql.connect.session" and found["backend"] == backend
    assert near(found["weights"], found["expected"]) and near(found["again"], found["by_hand"])
    assert found["columns"] == COLUMNS and found["history"] == ["loss", "mae", "val_loss", "val_mae"]


def test_classes_that_build_on_an_estimator(cluster: Application, tmp_path: Path) -> None:
    found = ask(cluster, "fit_subclass", store_path=str(tmp_path / "store"), saved=str(tmp_path))
    assert found["class"] == "PicturesModel" and found["alone"] == 2
    assert found["columns"] == ["file", "kind", "kind__output", "prediction"] and found["right"] == 24


ERRORS = {
    "columns": r"DataError: the DataFrame has no column 'featrues'; its columns are 'x0'",
    "shape": r"DataError: the model cannot be called with 'features' of shape \(4,\): ",
    "input_shapes": r"DataError: input_shapes: column 'features' has values of shape \(4,\), which do not fit \[-1",
    "label": r"DataError: label column 'y' has values of shape \(\), and the model's output for it is of shape \(3,\)",
    "label of arrays": r"DataError: label column 'y' has values of shape \(1,\), and the model's output for it is of",
    "label of lightning": r"DataError: label column 'y' has values of shape \(\), and the model's output for it is of",
    "label of keras": r"DataError: label column 'y' has values of shape \(1,\), and the model's output for it is of",
    "ragged": r"DataError: column 'x': ",
    "text": r"DataError: column 'x' is of type string: estimators train on numbers",
    "empty": r"DataError: there are no rows for training",
    "few": r"DataError: 1 rows for training are too few for 2 ranks: each needs at least one. Set num_proc",
    "null label": r"DataError: column 'y' has nulls",
    "store": r"StoreError: the store /proc/nowhere cannot be written to: ",
    "private store": r"StoreError: the store memory://x exists only in this process",
    "no store": r"ValueError: TorchEstimator needs a store",
    "no parquet": r"DataError: there is no Parquet data in ",
    "slots": r".*30",
    "own step": r"ValueError: train_minibatch_fn is for farandole.spark.torch.TorchEstimator",
    "weights of losses": r"ValueError: loss_weights is for a plain module",
    "parameter": r"TypeError: TorchEstimator has no parameter 'epoch'; did you mean epochs\?",
    "raises": r"AttributeError: 'Tensor' object has no attribute 'nonsense'",
}


def test_bad_input(cluster: Application, tmp_path: Path) -> None:
    found = ask(cluster, "bad_input", store_path=str(tmp_path / "store"))
    assert found.pop("left") == "[]"
    wrong = {name: text for name, text in found.items() if not re.match(ERRORS[name], text)}
    assert not wrong and found.keys() == ERRORS.keys()


def test_the_example(tmp_path: Path, cluster: Application) -> None:
    command = [sys.executable, str(ROOT / "examples" / "spark_digits.py"), "--store", str(tmp_path / "store")]
    done = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (accuracy,) = re.findall(r"accuracy ([\d.]+)% with 2 ranks", done.stdout)
    assert float(accuracy) > 80


def test_without_a_session(cluster: Application, tmp_path: Path) -> None:
    assert "there is no Spark session: make one first" in ask(cluster, "no_session", store_path=str(tmp_path))
