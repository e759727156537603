# A rank of a training with a logger of somebody else's: Weights & Biases, without a network.
# Touches Lightning and the folder SCRATCH.
"""Under the launcher; what the logger left is for the test to count."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import farandole.autoload

farandole.autoload.register()
warnings.filterwarnings("ignore")
import lightning.pytorch as pl  # noqa: E402
from lightning.pytorch.loggers import WandbLogger  # noqa: E402
from lightning_models import Regression, loader  # noqa: E402

if __name__ == "__main__":
    kept = WandbLogger(save_dir=Path(os.environ["SCRATCH"]), offline=True, project="test")
    trainer = pl.Trainer(
        strategy="farandole", accelerator="cpu", devices=1, max_epochs=1, log_every_n_steps=1, logger=kept,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Regression(), loader(16))
    if trainer.is_global_zero:
        kept.experiment.finish()
