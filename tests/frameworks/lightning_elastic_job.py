# A rank of an elastic job with Lightning: trains, kills itself at the steps in DEATHS, and counts every sample.
# Touches Lightning, torch and the folder SCRATCH.
"""RANKS is the number of ranks, three by default. Each entry of DEATHS kills one rank at one step, once."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import farandole.autoload

farandole.autoload.register()
warnings.filterwarnings("ignore")
import lightning.pytorch as pl  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import farandole.torch as hvd  # noqa: E402
from farandole.lightning import ElasticCallback  # noqa: E402
from farandole.world.runtime import runtime  # noqa: E402

SCRATCH = Path(os.environ["SCRATCH"])
RANKS, SAMPLES, EPOCHS = int(os.environ.get("RANKS", "3")), 120, int(os.environ.get("EPOCHS", "8"))
DEATHS = json.loads(os.environ.get("DEATHS", '{"first": [1, 6], "second": [0, 32]}'))  # name of the death: rank, step
COMMIT_OPTIONS = json.loads(os.environ.get("COMMITS", '{"every_n_steps": 2}'))


class Counting(pl.LightningModule):
    """`seen` counts how often each sample was used. It is a buffer, so a commit contains it like the weights."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.register_buffer("seen", torch.zeros(SAMPLES))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, numbers = batch
        for name, death in DEATHS.items():
            if death == [self.global_rank, self.global_step] and not (SCRATCH / name).exists():
                (SCRATCH / name).write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
        used_here = torch.zeros(SAMPLES)
        strategy: Any = self.trainer.strategy
        used_here[strategy._data_loader.loader.indices] = 1
        # The last batch of an epoch may be padded with samples that do not count.
        assert set(numbers.tolist()) >= set(used_here.nonzero().flatten().tolist())
        self.seen += strategy.reduce(used_here, reduce_op="sum")
        loss = (self.layer(x) - x.sum(1, keepdim=True)).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_rank == 0:
            with open(SCRATCH / "steps", "a") as file:
                file.write(json.dumps([time.time(), self.global_step, self.trainer.world_size]) + "\n")
        if self.trainer.world_size < RANKS and all((SCRATCH / name).exists() for name in DEATHS):
            time.sleep(0.6)  # sleep: training must not end before new ranks have joined

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.layer(batch[0]).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.5)


def main() -> None:
    """Trains. The process that is rank 0 at the end writes its counts, epoch and number of ranks to the file `end`."""
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(SAMPLES, 4, generator=draw), torch.arange(SAMPLES))
    module = Counting()
    checkpoints = ModelCheckpoint(SCRATCH / "checkpoints", save_last=True)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy="farandole", max_epochs=EPOCHS, log_every_n_steps=1,
        callbacks=[ElasticCallback(**COMMIT_OPTIONS), checkpoints], logger=CSVLogger(SCRATCH, name="csv"),
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    assert runtime.waiting == ("FARANDOLE_NEWCOMER" in os.environ)  # nobody has waited for this process yet
    trainer.fit(module, DataLoader(data, 4, shuffle=True), DataLoader(data, 30))
    hvd.check_equal(module)
    if trainer.is_global_zero:
        result = {"seen": module.seen.tolist(), "epoch": trainer.current_epoch, "size": trainer.world_size}
        (SCRATCH / "end").write_text(json.dumps(result))
        print("done", file=sys.stderr)


if __name__ == "__main__":
    main()
