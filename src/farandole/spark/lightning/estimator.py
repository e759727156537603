# LightningEstimator and LightningModel: a LightningModule, or a plain module with loss and optimizer, on a DataFrame.
# Touches torch on the driver; training.py runs in the ranks.
"""Batches come to `training_step` as dicts of tensors by column: `batch["features"]`, `batch["label"]`."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch

from ...launch.calls import pack as serialize
from ...launch.calls import unpack as deserialize
from ..common.params import FLOATS, declare
from ..common.task import Result, Task
from ..torch.estimator import TorchEstimator as PlainEstimator
from ..torch.estimator import TorchModel as PlainModel
from . import training

LIGHTNING_PARAMS: dict[str, Any] = {  # name: (default, help, type)
    "metrics": (
        [],
        "metrics of a plain module, logged as metric_0, val_metric_0 and so on; no effect with a LightningModule, "
        "which logs its own metrics",
        None,
    ),
    "loss_weights": (
        None,
        "weights of the labels' losses in their sum; an error with a LightningModule, which computes the sum itself",
        FLOATS,
    ),
    "train_minibatch_fn": (None, "an error: the LightningModule's training_step is used", None),
    "num_gpus": (None, "no effect: a rank trains on one GPU", None),
    "logger": (None, "a logger of Lightning, or False", None),
    "log_every_n_steps": (50, "steps between two entries of the logger", None),
    "loader_num_epochs": (None, "no effect: every epoch reads all rows", None),
    "terminate_on_nan": (False, "whether a loss that is NaN or infinite is an error", None),
    "profiler": (None, "a profiler of Lightning", None),
    "trainer_args": (None, "more arguments of Lightning's Trainer", None),
    "debug_data_loader": (False, "no effect", None),
    "train_async_data_loader_queue_size": (None, "no effect: one window of rows is read ahead", None),
    "val_async_data_loader_queue_size": (None, "no effect: one window of rows is read ahead", None),
}


@declare(LIGHTNING_PARAMS)
class LightningEstimator(PlainEstimator):
    """Trains a LightningModule with Lightning's Trainer."""

    FRAMEWORK = "lightning"

    def _check(self) -> None:
        if self.getOrDefault("train_minibatch_fn") is not None:
            raise ValueError(
                "train_minibatch_fn is for farandole.spark.torch.TorchEstimator: Lightning's Trainer runs the steps "
                "here. Write them as training_step of a LightningModule"
            )
        if training.lightning_package_of(self.getOrDefault("model")) is None:
            super()._check()  # a plain module: loss and optimizer are needed
        elif self.getOrDefault("loss_weights") is not None:
            raise ValueError(
                "loss_weights is for a plain module: a LightningModule computes its loss in training_step. "
                "Apply the weights there"
            )

    def _losses(self) -> list[Any]:
        """The losses of a plain module; a LightningModule computes its own."""
        return super()._losses() if training.lightning_package_of(self.getOrDefault("model")) is None else []

    def _payload(self) -> bytes:
        names = ("model", "optimizer", "loss", "loss_constructors", "metrics")
        return serialize({name: self.getOrDefault(name) for name in names})

    def _work(self) -> Callable[[Task], Result | None]:
        return training.train

    def get_model_class(self) -> type:
        """The class of fitted models."""
        return LightningModel

    def _create_model(self, result: Result, run_id: str, metadata: Any) -> Any:
        model = deserialize(serialize(self.getOrDefault("model")))
        model.load_state_dict(torch.load(io.BytesIO(result.weights), map_location="cpu", weights_only=True))
        # Lightning makes the optimizers in the ranks; their state is in the run's checkpoint.
        parameters = self._get_model_kwargs(model.eval(), result.history, None, run_id, metadata)
        return self.get_model_class()(**parameters)


class LightningModel(PlainModel):
    """A trained LightningModule; `getModel()` gives it, and `forward` predicts."""


# Horovod's names for these classes are the same as for plain PyTorch: TorchEstimator and TorchModel, in this module and
# in horovod.spark.lightning.
TorchEstimator = LightningEstimator
TorchModel = LightningModel
