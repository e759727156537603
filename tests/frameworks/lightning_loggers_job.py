# A rank that trains with the loggers named in LOGGERS, of other packages, one after the other, without a network.
# Touches Lightning and the folder SCRATCH.
"""Runs under the launcher. The test counts the files that the loggers have written."""

from __future__ import annotations

import os
import warnings
from typing import Any

import farandole.autoload

farandole.autoload.register()
warnings.filterwarnings("ignore")
import lightning.pytorch as pl  # noqa: E402
from lightning.pytorch import loggers  # noqa: E402
from lightning_models import Regression, loader  # noqa: E402


def made(name: str, folder: str) -> Any:
    """The logger; what it writes lies below `place`."""
    if name == "wandb":
        return loggers.WandbLogger(save_dir=folder, offline=True, project="test")
    if name == "mlflow":
        return loggers.MLFlowLogger("test", tracking_uri=f"file:{folder}/mlflow")
    # Lightning takes online=False for "disabled"; COMET_START_ONLINE=0 is what writes to a folder.
    return loggers.CometLogger(offline_directory=f"{folder}/comet", project="test")


def train(logger: Any) -> None:
    trainer = pl.Trainer(
        strategy="farandole", accelerator="cpu", devices=1, max_epochs=1, log_every_n_steps=1, logger=logger,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Regression(), loader(16))
    end = getattr(logger.experiment, "finish", None) or getattr(logger.experiment, "end", None)
    if trainer.is_global_zero and end is not None:
        end()


if __name__ == "__main__":
    os.chdir(os.environ["SCRATCH"])
    for name in os.environ["LOGGERS"].split():
        train(made(name, os.environ["SCRATCH"]))
