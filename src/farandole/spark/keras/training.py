# What a rank of KerasEstimator runs: model.fit on the rank's rows.
# Touches Keras, its binding and the rank's data.
"""`train(task)`; rank 0 returns the trained model and the history."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from typing import Any

from ...launch.calls import unpack as deserialize
from ..common.datamodule import data_of
from ..common.parquet import Array, Columns
from ..common.task import Progress, Result, Task
from . import models
from .library import KERAS, backend, binding, load

HISTORY = "farandole_history.json"  # inside the checkpoint, next to the files of Keras


def _arrays(batch: Columns, task: Task, library: str) -> tuple[Any, ...]:
    """A batch as `fit` takes it."""
    shapes = task.options["label_shapes"] or [None] * len(task.labels)
    labels: list[Array] = []
    for name, shape in zip(task.labels, shapes, strict=True):
        label = batch[name]
        labels.append(label if shape is None else label.reshape([len(label) if n == -1 else n for n in shape]))
    made = (
        models.inputs(batch, task.features, task.options["categorical_cols"], library),
        labels[0] if len(labels) == 1 else labels,
    )
    column = task.options["sample_weight_col"]
    return made if column is None else (*made, batch[column].astype("float32"))


def _training_data(task: Task, data: Any, first: int, library: str) -> Iterator[Any]:
    """All epochs from the first on, one after the other."""
    for epoch in range(first, task.options["epochs"]):
        for batch in data.train_data(epoch):
            yield _arrays(batch, task, library)


def _validation_data(task: Task, data: Any, library: str) -> Iterator[Any]:
    while True:
        for batch in data.val_data():
            yield _arrays(batch, task, library)


def _with_history(data: bytes, history: dict[str, list[float]]) -> bytes:
    file = io.BytesIO(data)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr(HISTORY, json.dumps(history))
    return file.getvalue()


def _recorder(task: Task, history: dict[str, list[float]], library: str) -> Any:
    callbacks: Any = load(library).callbacks
    hvd = binding(library)

    class Recorder(callbacks.Callback):  # type: ignore[misc]
        """Keeps the history and, on rank 0, saves at the end of each epoch."""

        def __init__(self) -> None:
            super().__init__()
            self._progress = Progress(task) if hvd.rank() == 0 else None

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            """For Keras."""
            for name, value in (logs or {}).items():
                history.setdefault(name, []).append(float(value))
            if self._progress is not None:
                if task.remote.saving_runs:
                    self._progress.checkpoint(_with_history(models.packed(self.model), history))
                text = ", ".join(f"{name} {float(value):.4g}" for name, value in (logs or {}).items())
                self._progress.note(history, f"epoch {epoch + 1} of {task.options['epochs']}: {text}")

    return Recorder()


def _choose_gpu(wanted: bool, library: str) -> None:
    """Makes only this rank's GPU visible, or none. Must run before any computation."""
    hvd, runs_on = binding(library), backend(library)
    if runs_on == "tensorflow":
        from tensorflow import config as devices

        found = devices.list_physical_devices("GPU")
        devices.set_visible_devices([found[hvd.local_rank() % len(found)]] if found and wanted else [], "GPU")
    elif runs_on == "torch" and wanted:
        from torch import cuda

        if cuda.is_available():
            cuda.set_device(hvd.local_rank() % cuda.device_count())


def _compiled(task: Task, held: dict[str, Any], library: str) -> Any:
    keras, hvd = load(library), binding(library)
    custom, options = held["custom_objects"], task.options
    with keras.saving.custom_object_scope(custom or {}):
        model = models.unpacked(held["model"], custom, library)
        optimizer = held["optimizer"]
        optimizer = (
            keras.optimizers.get(optimizer)
            if isinstance(optimizer, str)
            else keras.optimizers.deserialize(optimizer, custom_objects=custom)
        )
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        compression=options["gradient_compression"] or hvd.Compression.none,
        backward_passes_per_step=options["backward_passes_per_step"],
    )
    weighted: dict[str, Any] = {"weighted_metrics": []} if options["sample_weight_col"] else {}
    model.compile(
        optimizer=optimizer,
        loss=held["loss"],
        loss_weights=options["loss_weights"],
        metrics=held["metrics"] or None,
        **weighted,
    )
    return model


def _resumed(task: Task, held: dict[str, Any], library: str) -> tuple[Any, dict[str, list[float]]]:
    """The model of the run's checkpoint, with its optimizer's state."""
    import tempfile
    from pathlib import Path

    keras = load(library)
    data = task.remote.store.read(task.remote.checkpoint_path)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        history = json.loads(archive.read(HISTORY))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.keras")
        path.write_bytes(data)
        saved = keras.saving.load_model(path, custom_objects=held["custom_objects"], safe_mode=False)
    model = _compiled(task, held, library)  # with the user's options; the file has only those of Keras
    model.set_weights(saved.get_weights())
    model.optimizer.build(model.trainable_variables)
    for variable, saved_variable in zip(model.optimizer.variables, saved.optimizer.variables, strict=True):
        variable.assign(saved_variable)
    return model, history


def train(task: Task, library: str = KERAS) -> Result | None:
    """Runs in each rank."""
    keras, hvd = load(library), binding(library)
    hvd.init()
    _choose_gpu(task.options["use_gpu"], library)
    keras.utils.set_random_seed(task.seed)
    held, options = deserialize(task.payload), task.options
    history: dict[str, list[float]] = {}
    if task.resume:
        model, history = _resumed(task, held, library)
    else:
        model = _compiled(task, held, library)
    done = max(map(len, history.values()), default=0)
    data = data_of(task, hvd.rank(), hvd.size())
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        *(options["callbacks"] or []),
        _recorder(task, history, library),
    ]
    if options["checkpoint_callback"] is not None and hvd.rank() == 0:
        callbacks.append(options["checkpoint_callback"])
    validation: dict[str, Any] = {}
    if data.val_steps:
        validation = {"validation_data": _validation_data(task, data, library), "validation_steps": data.val_steps}
    if done < options["epochs"]:
        model.fit(
            _training_data(task, data, done, library),
            steps_per_epoch=data.train_steps,
            initial_epoch=done,
            epochs=options["epochs"],
            callbacks=callbacks,
            verbose=0,
            **validation,
        )
    return Result(models.packed(model), history) if hvd.rank() == 0 else None
