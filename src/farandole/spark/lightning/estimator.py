# LightningEstimator and LightningModel: a LightningModule, or a plain module with loss and optimizer, on a DataFrame.
# Touches torch on the driver; training.py runs in the ranks.
"""Batches come to `training_step` as dicts of tensors by column: `batch["features"]`, `batch["label"]`."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch

from ...launch.calls import pack, unpack
from ..common.params import FLOATS, declare
from ..common.task import Result, Task
from ..torch.estimator import TorchEstimator as PlainEstimator
from ..torch.estimator import TorchModel as PlainModel
from . import training

OF_LIGHTNING: dict[str, Any] = {
    "metrics": (
        [],
        "of a plain module: measured beside the loss, and logged as metric_0, val_metric_0 and so on; accepted with a "
        "LightningModule, which logs its own",
        None,
    ),
    "loss_weights": (
        None,
        "how much each label's loss counts; refused with a LightningModule, which has its own",
        FLOATS,
    ),
    "train_minibatch_fn": (None, "refused: the step is the LightningModule's training_step", None),
    "num_gpus": (None, "accepted: a rank trains on one GPU", None),
    "logger": (None, "a logger of Lightning, or False", None),
    "log_every_n_steps": (50, "steps between two of its lines", None),
    "loader_num_epochs": (None, "accepted: the data comes again in each epoch", None),
    "terminate_on_nan": (False, "whether a loss that is no number is an error", None),
    "profiler": (None, "a profiler of Lightning", None),
    "trainer_args": (None, "more arguments of Lightning's Trainer", None),
    "debug_data_loader": (False, "accepted", None),
    "train_async_data_loader_queue_size": (None, "accepted: one window of rows is read ahead", None),
    "val_async_data_loader_queue_size": (None, "accepted: one window of rows is read ahead", None),
}


@declare(OF_LIGHTNING)
class LightningEstimator(PlainEstimator):
    """Trains a LightningModule with Lightning's Trainer."""

    FRAMEWORK = "lightning"

    def _check(self) -> None:
        if self.getOrDefault("train_minibatch_fn") is not None:
            raise ValueError(
                "train_minibatch_fn is for farandole.spark.torch.TorchEstimator: Lightning's Trainer runs the steps "
                "here. Write them as training_step of a LightningModule"
            )
        if training.tree_of(self.getOrDefault("model")) is None:
            super()._check()  # a plain module: loss and optimizer are needed
        elif self.getOrDefault("loss_weights") is not None:
            raise ValueError(
                "loss_weights is for a plain module: a LightningModule adds up its losses in training_step. "
                "Weigh them there"
            )

    def _losses(self) -> list[Any]:
        """A LightningModule has its own."""
        return super()._losses() if training.tree_of(self.getOrDefault("model")) is None else []

    def _payload(self) -> bytes:
        names = ("model", "optimizer", "loss", "loss_constructors", "metrics")
        return pack({name: self.getOrDefault(name) for name in names})

    def _work(self) -> Callable[[Task], Result | None]:
        return training.train

    def get_model_class(self) -> type:
        """The class of fitted models."""
        return LightningModel

    def _create_model(self, result: Result, run_id: str, metadata: Any) -> Any:
        model = unpack(pack(self.getOrDefault("model")))
        model.load_state_dict(torch.load(io.BytesIO(result.weights), map_location="cpu", weights_only=True))
        # Lightning makes the optimizers in the ranks; their state is in the run's checkpoint.
        parameters = self._get_model_kwargs(model.eval(), result.history, None, run_id, metadata)
        return self.get_model_class()(**parameters)


class LightningModel(PlainModel):
    """A trained LightningModule; `getModel()` gives it, and `forward` predicts."""


# Horovod calls both as those for plain PyTorch, here and in the package.
TorchEstimator = LightningEstimator
TorchModel = LightningModel
