# What a rank of LightningEstimator runs: Lightning's Trainer with our strategy, on the rank's rows.
# Touches Lightning, torch, and the rank's data.
"""`train(task)`; rank 0 returns the weights and the history."""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

import farandole.torch as hvd

from ...base.named import module_of
from ...launch.calls import unpack as deserialize
from ...lightning.trees import strategy
from ..common.datamodule import data_of
from ..common.parquet import Columns
from ..common.task import Progress, Result, Task
from ..torch.batches import Inputs, as_list, number_type, takes_classes, tensor
from ..torch.training import Losses, per_label, transform_outputs

LIGHTNING_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def lightning_package_of(model: Any) -> str | None:
    """The package of Lightning that the model's class comes from; None for a plain module."""
    for name in LIGHTNING_PACKAGES:
        known = sys.modules.get(name)
        if known is not None and isinstance(model, known.LightningModule):
            return name
    return None


def wrapped(module: torch.nn.Module, held: dict[str, Any], task: Task) -> Any:
    """A plain module as a LightningModule; its parameters keep their names below `module.`."""
    losses = as_list(held["loss"]) if held["loss"] is not None else [
        make() for make in as_list(held["loss_constructors"])
    ]  # fmt: skip
    lightning: Any = module_of(LIGHTNING_PACKAGES[0])

    class Wrapped(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.module = module
            self._loss = Losses(task, losses)
            # Lightning moves what it knows to the device.
            self.losses = torch.nn.ModuleList([loss for loss in losses if isinstance(loss, torch.nn.Module)])

        def _measured(self, batch: Any, name: str) -> torch.Tensor:
            labels = [
                batch[label].long() if takes_classes(loss) else batch[label].to(number_type(self.module))
                for label, loss in zip(task.labels, losses, strict=True)
            ]
            outputs = self.module(*(batch[feature] for feature in task.features))
            column = task.options["sample_weight_col"]
            made, targets = transform_outputs(outputs, labels)
            loss = self._loss(made, targets, None if column is None else batch[column])
            self._tell(name, loss, len(labels[0]))
            for index, metric in enumerate(held["metrics"] or []):
                each = zip(per_label(metric, len(targets)), made, targets, task.labels, strict=True)
                for measure, output, target, label in each:
                    word = name.replace("loss", f"metric_{index}") + (f"_{label}" if len(targets) > 1 else "")
                    with torch.no_grad():
                        self._tell(word, torch.as_tensor(measure(output, target)).float(), len(target))
            return loss

        def _tell(self, name: str, value: torch.Tensor, rows: int) -> None:
            self.log(name, value, on_epoch=True, on_step=False, sync_dist=True, batch_size=rows)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            """For Lightning."""
            return self._measured(batch, "loss")

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            """For Lightning."""
            self._measured(batch, "val_loss")

        def configure_optimizers(self) -> Any:
            """For Lightning."""
            return held["optimizer"]

    return Wrapped()


class Rows(IterableDataset[Any]):
    """Batches of tensors, another epoch each time."""

    def __init__(self, task: Task, data: Any, dtype: torch.dtype, training: bool) -> None:
        self._task, self._data, self._dtype, self._training = task, data, dtype, training
        self._inputs = Inputs(task.features, task.options["input_shapes"], task.options["categorical_cols"])
        self.epoch = 0

    def __len__(self) -> int:
        return int(self._data.train_steps if self._training else self._data.val_steps)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        batches = self._data.train_data(self.epoch) if self._training else self._data.val_data()
        for batch in batches:
            yield self._tensors(batch)

    def _tensors(self, batch: Columns) -> dict[str, torch.Tensor]:
        made = dict(zip(self._task.features, self._inputs.tensors(batch, self._dtype, "cpu"), strict=True))
        shapes = self._task.options["label_shapes"] or [None] * len(self._task.labels)
        for name, shape in zip(self._task.labels, shapes, strict=True):
            whole = batch[name].dtype.kind in "iub"
            made[name] = tensor(batch[name], self._dtype, "cpu", shape, whole)
        for name in batch.keys() - made.keys():
            if batch[name].dtype.kind in "fiub":  # no texts that were left
                made[name] = tensor(batch[name], self._dtype, "cpu")
        return made


def _recorder(tree: str, task: Task, rows: Rows) -> Any:
    lightning: Any = module_of(tree)

    class Recorder(lightning.Callback):  # type: ignore[misc]
        """Keeps the history, tells the data which epoch it is, saves at the end of each."""

        def __init__(self) -> None:
            self.history: list[dict[str, Any]] = []
            self._progress = Progress(task) if hvd.rank() == 0 else None

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            """For Lightning."""
            loss = outputs["loss"] if isinstance(outputs, dict) else outputs
            if task.options["terminate_on_nan"] and loss is not None and not bool(torch.isfinite(loss).all()):
                raise ValueError(f"the loss of step {trainer.global_step} is {float(loss)}")

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            """For Lightning."""
            found = {name: float(value) for name, value in trainer.callback_metrics.items()}
            self.history.append({"epoch": trainer.current_epoch, **found})
            rows.epoch = trainer.current_epoch + 1
            if task.remote.saving_runs:
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder, "last.ckpt")
                    trainer.save_checkpoint(path)
                    if self._progress is not None:
                        self._progress.checkpoint(path.read_bytes())
            if self._progress is not None:
                text = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
                number, of = trainer.current_epoch + 1, task.options["epochs"]
                self._progress.note(self.history, f"epoch {number} of {of}: {text}")

        def state_dict(self) -> dict[str, Any]:
            """For Lightning's checkpoints."""
            return {"history": self.history}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """For Lightning's checkpoints."""
            self.history = list(state_dict["history"])
            rows.epoch = len(self.history)

    return Recorder()


@contextlib.contextmanager
def _checkpoint(task: Task) -> Iterator[str | None]:
    """The run's checkpoint as a file of this machine."""
    if not task.resume:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "last.ckpt")
        path.write_bytes(task.remote.store.read(task.remote.checkpoint_path))
        yield str(path)


def train(task: Task) -> Result | None:
    """In each rank."""
    for name in LIGHTNING_PACKAGES:
        # Before the model is read: its class decides which of the two it belongs to.
        with contextlib.suppress(ImportError):
            module_of(name)
    hvd.init()
    torch.manual_seed(task.seed)
    held, options = deserialize(task.payload), task.options
    plain = held["model"]
    package = lightning_package_of(plain)
    model = plain if package is not None else wrapped(plain, held, task)
    tree = package or LIGHTNING_PACKAGES[0]
    data = data_of(task, hvd.rank(), hvd.size())
    dtype = number_type(plain)
    rows, val = Rows(task, data, dtype, True), Rows(task, data, dtype, False) if data.val_steps else None
    recorder = _recorder(tree, task, rows)
    arguments = {
        "strategy": strategy(tree)(compression=options["gradient_compression"] or hvd.Compression.none),
        "accelerator": "gpu" if options["use_gpu"] and torch.cuda.is_available() else "cpu",
        "devices": 1,
        "max_epochs": options["epochs"],
        "callbacks": [*(options["callbacks"] or []), recorder],
        "logger": options["logger"] if options["logger"] is not None else False,
        "log_every_n_steps": options["log_every_n_steps"],
        "profiler": options["profiler"],
        "accumulate_grad_batches": options["backward_passes_per_step"],
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        **(options["trainer_args"] or {}),
    }
    trainer = module_of(tree).Trainer(**arguments)
    loaders = [None if one is None else DataLoader(one, batch_size=None) for one in (rows, val)]
    with _checkpoint(task) as path:
        trainer.fit(model, loaders[0], loaders[1], ckpt_path=path, weights_only=False if path else None)
    if hvd.rank() != 0:
        return None
    file = io.BytesIO()
    torch.save({name: value.cpu() for name, value in plain.state_dict().items()}, file)
    return Result(file.getvalue(), recorder.history)
