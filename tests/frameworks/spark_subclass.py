# Classes that derive from those of horovod.spark.lightning, as other libraries do: an estimator for image files.
# Touches the store and the ranks that the estimator is given.
"""`Pictures(classes=..., picture_col=..., store=...)`: its own parameters, backend, model class and prediction."""

from __future__ import annotations

from typing import Any

import numpy as np
import spark_estimator_cases as cases
import torch
from lightning import pytorch as lightning
from pyspark import keyword_only
from pyspark.ml.param.shared import Param, Params, TypeConverters
from pyspark.sql import functions as F

from horovod.spark.common.backend import SparkBackend
from horovod.spark.common.store import Store
from horovod.spark.lightning import TorchEstimator, TorchModel


class Net(lightning.LightningModule):
    """A linear model of four pixels."""

    def __init__(self, classes: int, picture_col: str, label_col: str) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, classes)
        torch.nn.init.zeros_(self.inner.weight)
        self._columns = (picture_col, label_col)

    def forward(self, x: Any) -> Any:
        """For Lightning."""
        return self.inner(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """For Lightning."""
        picture, label = (batch[name] for name in self._columns)
        return torch.nn.functional.cross_entropy(self(picture), label.long())

    def configure_optimizers(self) -> Any:
        """For Lightning."""
        return torch.optim.SGD(self.parameters(), lr=0.5)


def pixels(picture: bytes) -> Any:
    """The pixels of a file's bytes."""
    return np.frombuffer(picture, np.uint8).astype(np.float32) / 255


class HasPictures(Params):
    """Parameters of both classes."""

    picture_col = Param(Params._dummy(), "picture_col", "column of files", TypeConverters.toString)
    prediction_col = Param(Params._dummy(), "prediction_col", "column of classes", TypeConverters.toString)


class Pictures(TorchEstimator, HasPictures):  # type: ignore[misc]
    """Trains a Net."""

    classes = Param(Params._dummy(), "classes", "how many", TypeConverters.toInt)

    @keyword_only
    def __init__(self, classes: int = 2, picture_col: str = "picture", prediction_col: str = "prediction",
                 label_cols: Any = None, store: Any = None, batch_size: int = 4, epochs: int = 1, verbose: int = 1,
                 random_seed: int | None = None, backend: Any = None) -> None:  # fmt: skip
        super().__init__()
        self._setDefault(classes=2, picture_col="picture", prediction_col="prediction", label_cols=["label"])
        self._set(**self._input_kwargs)
        column, label = self.getOrDefault("picture_col"), self.getLabelCols()[0]
        self.setFeatureCols([column])

        def transformed(frame: Any) -> Any:
            frame[column] = [pixels(one) for one in frame[column]]
            return frame

        self.setTransformationFn(transformed)
        self._set(model=Net(self.getOrDefault("classes"), column, label))

    def _get_or_create_backend(self) -> Any:
        given = self.getBackend()
        return SparkBackend(2, verbose=0, prefix_output_with_timestamp=True) if given is None else given

    def get_model_class(self) -> type:
        """The class of fitted models."""
        return PicturesModel

    def _get_model_kwargs(self, model: Any, history: Any, optimizer: Any, run_id: str, metadata: Any) -> dict[str, Any]:
        return {
            "history": history,
            "model": model,
            "optimizer": optimizer,
            "input_shapes": self.getInputShapes(),
            "run_id": run_id,
            "_metadata": metadata,
            "loss": self.getLoss(),
            "loss_constructors": self.getLossConstructors(),
            "label_columns": self.getLabelCols(),
            "picture_col": self.getOrDefault("picture_col"),
            "prediction_col": self.getOrDefault("prediction_col"),
        }


class PicturesModel(TorchModel, HasPictures):  # type: ignore[misc]
    """Predicts classes."""

    @keyword_only
    def __init__(self, history: Any = None, model: Any = None, optimizer: Any = None, input_shapes: Any = None,
                 run_id: Any = None, _metadata: Any = None, loss: Any = None, loss_constructors: Any = None,
                 label_columns: Any = None, picture_col: str = "picture",
                 prediction_col: str = "prediction") -> None:  # fmt: skip
        super().__init__()
        self._setDefault(picture_col="picture", prediction_col="prediction")
        self._set(**self._input_kwargs)
        self.setFeatureColumns([self.getOrDefault("picture_col")])
        self.setLabelColoumns(self.getLabelColumns())  # as Horovod spelt it

    def get_prediction_fn(self) -> Any:
        """Opens the file of a row."""
        column = self.getOrDefault("picture_col")

        def predict(model: Any, row: Any) -> Any:
            return model(torch.from_numpy(pixels(row[column])).reshape(1, 4))

        return predict

    def _transform(self, dataset: Any) -> Any:
        found = super()._transform(dataset)
        chosen = F.udf(lambda vector: float(np.argmax(vector)), "double")
        return found.withColumn(self.getOrDefault("prediction_col"), chosen(self.getOutputCols()[0]))


def fit_subclass(store_path: str, saved: str) -> Any:
    """Fits an estimator and a model that derive from ours, on a column of bytes."""
    draw = np.random.default_rng(3).integers(0, 256, (24, 4)).astype(np.uint8)
    draw[:, 0] = np.arange(24) % 2 * 255  # the first two pixels show the class
    draw[:, 1] = 255 - draw[:, 0]
    data = [(bytearray(picture.tobytes()), float(picture[0] > picture[1])) for picture in draw]
    frame = cases.spark.createDataFrame(data, "file binary, kind double").coalesce(1)
    estimator = Pictures(
        classes=2, picture_col="file", label_cols=["kind"], store=Store.create(store_path), epochs=8, random_seed=1,
        verbose=0, backend=cases.shared_ranks,
    )  # fmt: skip
    fitted = estimator.fit(frame)
    fitted.save(f"{saved}/pictures")
    made = PicturesModel.load(f"{saved}/pictures").transform(frame)
    return {
        "class": type(fitted).__name__,
        "columns": made.columns,
        "right": sum(row["prediction"] == row["kind"] for row in made.collect()),
        "alone": estimator.copy({estimator.backend: None})._get_or_create_backend().num_processes(),
    }
