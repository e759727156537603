# What the tests of Spark's estimators do in a driver: each case returns plain data that the test checks.
# Touches Spark, the stores it is given, and the ranks that Spark runs.
"""Models and functions of users are nested, so that cloudpickle sends their code to the ranks."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from farandole.spark import SparkExecutor
from farandole.spark.common.backend import Arguments, Backend, KeywordArguments, Variables

RANKS = 2
START = np.random.default_rng(1).uniform(-0.5, 0.5, (4, 1)).astype(np.float32)  # a model's weights before training
spark: Any = None


def run_case(session: Any, of: str, **arguments: Any) -> Any:
    """Runs one of the cases below."""
    use(session)
    elsewhere = {"fit_subclass": "spark_subclass", "bad_input": "spark_bad_input", "no_session": "spark_bad_input"}
    known = vars(importlib.import_module(elsewhere[of])) if of in elsewhere else globals()
    return known[of](**arguments)


def use(session: Any) -> None:
    """Makes this session the one that all cases use."""
    global spark
    spark = session
    spark.conf.set("spark.sql.shuffle.partitions", "2")


class SharedRanks(Backend):
    """Ranks in slots of Spark that several fits use, so that they import each framework once."""

    def __init__(self) -> None:
        self._executor: SparkExecutor | None = None

    def run(
        self, fn: Callable[..., Any], args: Arguments = (), kwargs: KeywordArguments = None, env: Variables = None
    ) -> list[Any]:
        """Calls the function in every rank."""
        if self._executor is None:
            self._executor = SparkExecutor(RANKS, env={"KERAS_BACKEND": "torch"}).start()
        return list(self._executor.run(fn, tuple(args), dict(kwargs or {})))

    def num_processes(self) -> int:
        """The number of ranks."""
        return RANKS

    def shut_down(self) -> None:
        """Gives the slots back."""
        if self._executor is not None:
            self._executor.shutdown()
        self._executor = None


shared_ranks = SharedRanks()


def shut_down() -> None:
    """Ends the shared ranks."""
    shared_ranks.shut_down()


def rows(count: int = 40, weight: bool = False) -> Any:
    """Columns x0 .. x3, y (a weighted sum of them) and `held`, which marks the rows for validation."""
    draw = np.random.default_rng(7).uniform(-1, 1, (count, 4)).round(3)
    made = [(*map(float, x), float(x @ [1, -2, 3, 0.5]), index % 5 == 0) for index, x in enumerate(draw)]
    names = "x0 double, x1 double, x2 double, x3 double, y double, held boolean"
    return spark.createDataFrame(made, names).coalesce(1)


def linear() -> Any:
    import torch

    made = torch.nn.Linear(4, 1)
    made.load_state_dict({"weight": torch.from_numpy(START.T), "bias": torch.zeros(1)})
    return made


def assembler() -> Any:
    from pyspark.ml.feature import VectorAssembler

    return VectorAssembler(inputCols=["x0", "x1", "x2", "x3"], outputCol="features")


def error_stage() -> Any:
    """A stage of MLlib after the estimator: it adds the column `error`."""
    from pyspark.ml.feature import SQLTransformer

    return SQLTransformer(statement="SELECT *, y__output - y AS error FROM __THIS__")


def common_parameters(store_path: str, **more: Any) -> dict[str, Any]:
    """Parameters of all estimators. With `num_proc` the fit starts its own ranks instead of the shared ones."""
    from farandole.spark.common.store import Store

    return {
        **({} if "num_proc" in more else {"backend": shared_ranks}),
        "store": Store.create(store_path),
        "feature_cols": ["features"],
        "label_cols": ["y"],
        "batch_size": 6,
        "epochs": 2,
        "random_seed": 11,
        "partitions_per_process": 2,
        "verbose": 0,
        **more,
    }


def torch_estimator(store_path: str, **more: Any) -> Any:
    import torch

    from farandole.spark.torch import TorchEstimator

    model = more.pop("model", None) or linear()
    made = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "loss": torch.nn.MSELoss(), **more}
    return TorchEstimator(model=model, **common_parameters(store_path, **made))


def epoch_recorder(folder: str, kind: str, name: str = "callback") -> Any:
    """A callback of a framework that leaves a file for each rank and epoch; a second one of the same name fails."""
    from pathlib import Path

    Path(folder, "records").mkdir(exist_ok=True)

    def note(epoch: int, found: Any = None) -> None:
        from pathlib import Path

        import farandole as hvd

        Path(folder, "records", f"{name} rank {hvd.rank()} epoch {epoch}").touch(exist_ok=False)

    if kind == "torch":
        return note
    if kind == "keras":
        import keras

        class Told(keras.callbacks.Callback):  # type: ignore[misc]
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                note(epoch)

        return Told()
    from lightning import pytorch as lightning

    class Noted(lightning.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            note(trainer.current_epoch)

    return Noted()


def recording_compression(folder: str) -> Any:
    """A compression that changes nothing, and leaves a file for each rank."""
    from pathlib import Path

    import torch

    from farandole.torch import Compression

    Path(folder, "records").mkdir(exist_ok=True)

    class Noted(Compression.none):  # type: ignore[misc,valid-type]
        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
            from pathlib import Path

            import farandole as hvd

            Path(folder, "records", f"compressed by rank {hvd.rank()}").touch()
            return tensor, None

    return Noted


def records(folder: str) -> list[str]:
    """The names of the files that callbacks have written."""
    from pathlib import Path

    return sorted(one.name for one in Path(folder, "records").iterdir())


def rank_readers(store_path: str, columns: list[str]) -> list[Any]:
    """A reader for each rank: it gives the rows that this rank had in the last fit."""
    from farandole.spark.common.parquet import inspect
    from farandole.spark.common.reader import Reader
    from farandole.spark.common.store import Store

    store = Store.create(store_path)
    (path,) = [one for one in store.fs.ls(store_path, detail=False) if "train_data" in one]
    data = inspect(store, path, columns)
    return [Reader(store, data, 6, rank, RANKS, 11) for rank in range(RANKS)]


def written_labels(store_path: str, label: str = "y") -> list[list[float]]:
    """The label's values in the rows that the last fit wrote: the training rows, and the validation rows."""
    from farandole.spark.common.parquet import inspect
    from farandole.spark.common.reader import Reader
    from farandole.spark.common.store import Store

    store, found = Store.create(store_path), []
    for purpose in ("train_data", "val_data"):
        (path,) = [one for one in store.fs.ls(store_path, detail=False) if purpose in one]
        data = Reader(store, inspect(store, path, [label]), 6, shuffle=False)
        found.append(sorted(float(one) for batch in data.epoch(0) for one in batch[label]))
    return found


def trained_without_spark(store_path: str, epochs: int, model: Any, optimizer: Any) -> list[float]:
    """Plain torch in this process, on the same rows in the same order: a step's gradient is the mean of the ranks'."""
    import torch

    parts = rank_readers(store_path, ["features", "y"])
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


def loaded_pipeline_output(frame: Any) -> dict[str, Any]:
    """The output of a loaded pipeline. Its last column comes from the stage after the model."""
    return {"columns": frame.columns, "again": predictions(frame)}


def fit_torch_in_pipeline(store_path: str, saved: str) -> Any:
    import torch
    from pyspark.ml import Pipeline, PipelineModel
    from pyspark.ml.evaluation import RegressionEvaluator

    seen = torch.nn.functional.l1_loss
    estimator = torch_estimator(store_path, num_proc=RANKS, validation="held", metrics=[seen], epochs=3)
    fitted = Pipeline(stages=[assembler(), estimator, error_stage()]).fit(rows())
    model: Any = fitted.stages[1]
    plain = linear()
    expected = trained_without_spark(store_path, 3, plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
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
        "by_hand": model_outputs(plain),
        "written": written_labels(store_path),
        "rows": [sorted(row["y"] for row in rows().collect() if row["held"] is held) for held in (False, True)],
        "rmse": RegressionEvaluator(labelCol="y", predictionCol="y__output").evaluate(made),
    }


def model_outputs(model: Any) -> list[float]:
    import torch

    values = np.array([list(row)[:5] for row in rows().orderBy("y").collect()], dtype=np.float32)
    with torch.no_grad():
        return [float(one) for one in model(torch.from_numpy(values[:, :4])).flatten()]


def plain_lightning_estimator(store_path: str, **more: Any) -> Any:
    """A torch module without training steps: the estimator adds them."""
    import torch

    from farandole.spark.lightning import LightningEstimator

    model = more.pop("model", None) or linear()
    terms = {
        "validation": "held",
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "loss": torch.nn.MSELoss(),
        **more,
    }
    return LightningEstimator(
        model=model, **common_parameters(store_path, metrics=[torch.nn.functional.l1_loss], **terms)
    )


def lightning_estimator(store_path: str, **more: Any) -> Any:
    import torch
    from lightning import pytorch as lightning

    from farandole.spark.lightning import LightningEstimator

    class Line(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear()

        def forward(self, x: Any) -> Any:
            return self.inner(x)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = torch.nn.functional.mse_loss(self(batch["features"]), batch["y"].reshape(-1, 1))
            self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            loss = torch.nn.functional.mse_loss(self(batch["features"]), batch["y"].reshape(-1, 1))
            self.log("val_loss", loss, sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    return LightningEstimator(model=Line(), **common_parameters(store_path, validation="held", **more))


def keras_module() -> Any:
    """Keras 3; tf_keras if TF_USE_LEGACY_KERAS asks for it."""
    return importlib.import_module("tf_keras" if os.environ.get("TF_USE_LEGACY_KERAS") == "1" else "keras")


def keras_estimator(store_path: str, **more: Any) -> Any:
    keras = keras_module()
    from farandole.spark.keras import KerasEstimator

    model = more.pop("model", None)
    if model is None:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.set_weights([START, np.zeros(1)])
    terms = {
        "validation": "held",
        "loss": "mse",
        "optimizer": keras.optimizers.SGD(0.1, momentum=0.9),
        "metrics": ["mae"],
        **more,
    }
    return KerasEstimator(model=model, **common_parameters(store_path, **terms))


def weights_in_order(model: Any) -> list[float]:
    """The weights of a model of any framework, in the same order."""
    if hasattr(model, "get_weights"):
        return [float(x) for one in model.get_weights() for x in one.flatten()]
    return flat(model)


ESTIMATORS = {"lightning": lightning_estimator, "keras": keras_estimator, "plain": plain_lightning_estimator}


def fit_in_pipeline(store_path: str, saved: str, kind: str) -> Any:
    """A fit of two epochs; the pipeline is then saved and loaded."""
    import torch
    from pyspark.ml import Pipeline, PipelineModel

    more = {
        "keras": lambda: {"checkpoint_callback": epoch_recorder(saved, kind, "saved")},
        "lightning": lambda: {"gradient_compression": recording_compression(saved)},
    }[kind]()
    estimator = ESTIMATORS[kind](store_path, callbacks=[epoch_recorder(saved, kind)], **more)
    fitted = Pipeline(stages=[assembler(), estimator, error_stage()]).fit(rows())
    model: Any = fitted.stages[1]
    plain = linear()
    expected = trained_without_spark(store_path, 2, plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
    fitted.save(f"{saved}/fitted")
    return {
        "weights": weights_in_order(model.getModel()),
        "expected": expected,
        "history": model.getHistory(),
        **loaded_pipeline_output(PipelineModel.load(f"{saved}/fitted").transform(rows())),
        "records": records(saved),
        "by_hand": model_outputs(plain),
    }


def resumed_fit(store_path: str, kind: str) -> Any:
    """A fit of one epoch, and a second fit that resumes this run. The data is written once."""
    import torch

    frame = assembler().transform(rows())
    estimator = ESTIMATORS[kind](store_path, run_id="walk")
    first = estimator.fit(frame, {estimator.epochs: 1})
    second = estimator.fit(frame)
    plain = linear()
    expected = trained_without_spark(store_path, 2, plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
    return {
        "weights": weights_in_order(second.getModel()),
        "expected": expected,
        "histories": [first.getHistory(), second.getHistory()],
    }


def resumed_fit_on_parquet(store_path: str, saved: str) -> Any:
    """Vectors as Spark itself writes them, dense and sparse; an estimator that was saved; a run that is resumed."""
    import torch
    from pyspark.ml.linalg import Vectors

    from farandole.spark.torch import TorchEstimator

    plain = linear()
    data = [
        (Vectors.sparse(4, [1], [n / 20]) if n % 2 else Vectors.dense([n / 20, 1.0, 0.0, 0.5]), n / 10)
        for n in range(20)
    ]
    frame = spark.createDataFrame(data, ["features", "y"])
    estimator = torch_estimator(
        store_path, num_proc=RANKS, run_id="walk", epochs=1, callbacks=[epoch_recorder(saved, "torch")]
    )
    frame.coalesce(1).write.parquet(estimator.getStore().get_train_data_path())
    estimator.save(f"{saved}/estimator")
    loaded = TorchEstimator.load(f"{saved}/estimator")
    first = loaded.fit_on_parquet()
    second = loaded.fit_on_parquet({loaded.epochs: 3})
    expected = trained_without_spark(store_path, 3, plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
    store = estimator.getStore()
    return {
        "same": [loaded.uid == estimator.uid, loaded.getEpochs(), loaded.getFeatureCols(), loaded.getNumProc()],
        "first": len(first.getHistory()),
        "second": [one["epoch"] for one in second.getHistory()],
        "weights": flat(second.getModel()),
        "expected": expected,
        "files": [
            store.exists(store.get_checkpoint_path("walk")),
            store.exists(f"{store.get_logs_path('walk')}/history.json"),
        ],
        "checkpoints": len(store.get_checkpoints("walk")),
        "records": records(saved),
    }


def several_outputs(store_path: str) -> Any:
    """Two labels, weights of losses and samples, arrays with nulls, a transformation, categorical columns."""
    import torch

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.one, self.two = torch.nn.Linear(3, 1), torch.nn.Linear(3, 2)

        def forward(self, x: Any, k: Any) -> Any:
            assert k.dtype == torch.int64 and not torch.isnan(x).any()
            return self.one(x), self.two(x)

    def filled(frame: Any) -> Any:
        frame["x"] = [np.nan_to_num(one) for one in frame["x"]]
        return frame

    data = [([n / 10, 1.0, 2.0] if n % 4 else None, n, n / 5, float(n % 2), 1.0) for n in range(24)]
    frame = spark.createDataFrame(data, "x array<double>, k int, y double, kind double, weight double")
    model = Two()
    estimator = torch_estimator(
        store_path,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        feature_cols=["x", "k"],
        categorical_cols=["k"],
        label_cols=["y", "kind"],
        loss=[torch.nn.MSELoss(), torch.nn.CrossEntropyLoss()],
        loss_weights=[0.25, 0.75],
        sample_weight_col="weight",
        transformation_fn=filled,
        validation=0.3,
        epochs=3,
    )
    fitted = estimator.fit(frame).setOutputCols(["a", "b"])
    made = fitted.transform(frame.where("x is not null")).select("a", "b").collect()
    history = fitted.getHistory()
    return {
        "losses": [one["train"]["loss"] for one in history],
        "validated": [one["validation"]["loss"] for one in history],
        "written": written_labels(store_path),
        "kinds": sorted({f"{type(row['a']).__name__} {type(row['b']).__name__} {len(row['b'])}" for row in made}),
        "rows": len(made),
    }
