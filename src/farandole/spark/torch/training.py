# What a rank of TorchEstimator runs: epochs over its rows, with metrics, validation and checkpoints.
# Touches torch, farandole.torch and the rank's data.
"""`train(task)`; rank 0 returns the weights and the history."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import farandole.torch as hvd

from ...launch.calls import unpack as deserialize
from ..common.datamodule import data_of
from ..common.parquet import Columns
from ..common.task import Progress, Result, Task
from .batches import Inputs, as_list, matched, number_type, takes_classes, tensor

Batch = tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor | None]


class Losses:
    """The losses of all outputs as one."""

    def __init__(self, task: Task, losses: list[Any]) -> None:
        self._losses = losses
        self._weights = task.options["loss_weights"] or [1.0] * len(losses)

    def __call__(self, outputs: Any, labels: Sequence[torch.Tensor], sample_weights: Any = None) -> torch.Tensor:
        """The weighted sum of the losses; with weights of samples, each loss is the weighted mean over its samples."""
        total = torch.zeros(())
        for loss, weight, output, label in zip(self._losses, self._weights, as_list(outputs), labels, strict=True):
            one = loss(output, label) if sample_weights is None else _weighted(loss, output, label, sample_weights)
            total = total.to(one.device) + weight * one
        return total


def _weighted(loss: Any, output: torch.Tensor, label: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    if isinstance(loss, torch.nn.Module) and hasattr(loss, "reduction"):
        loss = copy.copy(loss)
        loss.reduction = "none"
        each = loss(output, label)
    else:
        each = loss(output, label, reduction="none")
    rows: torch.Tensor = each.reshape(len(weights), -1).mean(dim=1)
    return (rows * weights).mean()


def transform_outputs(outputs: Any, labels: Sequence[torch.Tensor]) -> tuple[list[Any], list[torch.Tensor]]:
    """Outputs as a list, and the labels in their shapes."""
    made = as_list(outputs)
    return made, matched(made, labels)


class Training:
    """A rank's model, optimizer and data."""

    def __init__(self, task: Task) -> None:
        self._task, options = task, task.options
        held = deserialize(task.payload)
        gpu = options["use_gpu"] and torch.cuda.is_available()
        self._device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count()) if gpu else "cpu"
        self.model = held["model"].to(self._device)
        losses = as_list(held["loss"]) if held["loss"] is not None else [
            make() for make in as_list(held["loss_constructors"])
        ]  # fmt: skip
        losses = [loss.to(self._device) if isinstance(loss, torch.nn.Module) else loss for loss in losses]
        self._metrics: list[Any] = held["metrics"] or []
        self._inputs = Inputs(task.features, options["input_shapes"], options["categorical_cols"])
        self._whole = [takes_classes(loss) for loss in losses]
        self._loss = Losses(task, losses)
        self._data = data_of(task, hvd.rank(), hvd.size())
        self.history: list[dict[str, Any]] = []
        if task.resume:
            self._load(held["optimizer"])
        passes = options["backward_passes_per_step"]
        self.optimizer = hvd.DistributedOptimizer(
            held["optimizer"],
            named_parameters=self.model.named_parameters(),
            compression=options["gradient_compression"] or hvd.Compression.none,
            backward_passes_per_step=passes,
        )
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(self.optimizer, root_rank=0)
        self._passes = passes

    def _load(self, optimizer: Any) -> None:
        """Continues from the run's checkpoint. All ranks read the same file."""
        remote = self._task.remote
        data = remote.store.read(remote.checkpoint_path)
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        self.model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        self.history = state["history"]

    def save(self) -> bytes:
        """Everything that a later run needs to continue."""
        file = io.BytesIO()
        state = {name: value.cpu() for name, value in self.model.state_dict().items()}
        torch.save({"model": state, "optimizer": self.optimizer.state_dict(), "history": self.history}, file)
        return file.getvalue()

    def _batches(self, data: Iterator[Columns]) -> Iterator[Batch]:
        dtype, options = number_type(self.model), self._task.options
        shapes = options["label_shapes"] or [None] * len(self._task.labels)
        for batch in data:
            labels = [
                tensor(batch[name], dtype, self._device, shape, whole)
                for name, shape, whole in zip(self._task.labels, shapes, self._whole, strict=True)
            ]
            column = options["sample_weight_col"]
            weights = None if column is None else tensor(batch[column], dtype, self._device)
            yield self._inputs.tensors(batch, dtype, self._device), labels, weights

    def _step(self, number: int, last: bool, batch: Batch) -> tuple[Any, torch.Tensor]:
        inputs, labels, weights = batch
        user_function = self._task.options["train_minibatch_fn"]
        if user_function is not None:
            found: tuple[Any, torch.Tensor] = user_function(
                self.model, self.optimizer, transform_outputs, self._loss, inputs, labels, weights
            )
            return found
        if number % self._passes == 0:
            self.optimizer.zero_grad()
        outputs, labels = transform_outputs(self.model(*inputs), labels)
        loss = self._loss(outputs, labels, weights)
        loss.backward()
        if (number + 1) % self._passes == 0 or last:
            self.optimizer.step()
        return outputs, loss

    def epoch(self, number: int) -> dict[str, Any]:
        """Trains on all rows once, and validates."""
        self.model.train()
        sums, steps = Sums(), self._data.train_steps
        for step, batch in enumerate(self._batches(self._data.train_data(number))):
            outputs, loss = self._step(step, step + 1 == steps, batch)
            self._measure(sums, outputs, batch, loss)
        found = {"epoch": number, "train": self._means(sums, "train")}
        if self._data.val_steps:
            found["validation"] = self._validate()
        return found

    def _validate(self) -> dict[str, Any]:
        self.model.eval()
        sums = Sums()
        with torch.no_grad():
            for batch in self._batches(self._data.val_data()):
                outputs, labels = transform_outputs(self.model(*batch[0]), batch[1])
                self._measure(sums, outputs, batch, self._loss(outputs, labels, batch[2]))
        return self._means(sums, "validation")

    def _measure(self, sums: Sums, outputs: Any, batch: Batch, loss: torch.Tensor) -> None:
        with torch.no_grad():
            made, labels = transform_outputs(outputs, batch[1])
            values = [float(loss.detach())]
            for metric in self._metrics:
                # One metric, or a list with one per label.
                for each, output, label in zip(per_label(metric, len(labels)), made, labels, strict=True):
                    values.append(float(each(output, label)))
        sums.add(values, len(batch[1][0]))

    def _means(self, sums: Sums, purpose: str) -> dict[str, Any]:
        rows, loss, *values = hvd.allreduce(sums.tensor(), op=hvd.Sum, name=f"{purpose}.metrics").tolist()
        count = len(self._task.labels)
        groups = [[value / rows for value in values[at : at + count]] for at in range(0, len(values), count)]
        return {"loss": loss / rows, "all_metrics": groups}


class Sums:
    """Means of measured values, weighted by rows."""

    def __init__(self) -> None:
        self.rows = 0.0
        self._values: list[float] = []

    def add(self, values: list[float], rows: int) -> None:
        """One batch."""
        self.rows += rows
        before = self._values or [0.0] * len(values)
        self._values = [old + value * rows for old, value in zip(before, values, strict=True)]

    def tensor(self) -> torch.Tensor:
        """Rows, and the sums."""
        return torch.tensor([self.rows, *self._values], dtype=torch.float64)


def per_label(metric: Any, labels: int) -> list[Callable[..., Any]]:
    """A metric for each label."""
    return list(metric) if isinstance(metric, list | tuple) else [metric] * labels


def _tell(callback: Any, epoch: int, found: dict[str, Any]) -> None:
    hook = getattr(callback, "on_epoch_end", None)
    (callback if hook is None or inspect.isclass(callback) else hook)(epoch, found)


def train(task: Task) -> Result | None:
    """Runs in each rank."""
    hvd.init()
    torch.manual_seed(task.seed)
    training = Training(task)
    progress = Progress(task) if hvd.rank() == 0 else None
    for number in range(len(training.history), task.options["epochs"]):
        found = training.epoch(number)
        training.history.append(found)
        if progress is not None:
            progress.checkpoint(training.save())
            losses = ", ".join(
                f"{name} loss {found[name]['loss']:.4g}" for name in ("train", "validation") if name in found
            )
            progress.note(training.history, f"epoch {number + 1} of {task.options['epochs']}: {losses}")
        for callback in task.options["callbacks"] or []:
            _tell(callback, number, found)
    return Result(training.save(), training.history) if hvd.rank() == 0 else None
