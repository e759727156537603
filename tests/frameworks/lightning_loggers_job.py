# A rank of a training with loggers of others: Weights & Biases, Comet and Neptune without a network, MLflow to a file.
# Touches Lightning and the folder SCRATCH.
"""`python lightning_loggers_job.py NAME...` under the launcher; what each logger left is for the test to count."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import farandole.autoload

farandole.autoload.register()
warnings.filterwarnings("ignore")
import lightning.pytorch as pl  # noqa: E402
from lightning.pytorch import loggers  # noqa: E402
from lightning_models import Regression, loader  # noqa: E402

SCRATCH = Path(os.environ["SCRATCH"])


def made(name: str) -> Any:
    """A logger that talks to nobody."""
    if name == "wandb":
        return loggers.WandbLogger(save_dir=SCRATCH, offline=True, project="test")
    if name == "mlflow":
        return loggers.MLFlowLogger(tracking_uri=(SCRATCH / "mlflow").as_uri())
    if name == "comet_ml":
        return loggers.CometLogger(online=False, offline_directory=str(SCRATCH / "comet"), project="test")
    return loggers.NeptuneLogger(project="test/test", api_key="ANONYMOUS", mode="offline")


if __name__ == "__main__":
    os.chdir(SCRATCH)  # Neptune writes where it is
    for name in sys.argv[1:]:
        kept = made(name)
        trainer = pl.Trainer(
            strategy="farandole", accelerator="cpu", devices=1, max_epochs=1, log_every_n_steps=1, logger=kept,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Regression(), loader(16))
        kept.finalize("success")
        if name == "wandb" and trainer.is_global_zero:
            kept.experiment.finish()
        if name == "comet_ml" and trainer.is_global_zero:
            kept.experiment.end()
