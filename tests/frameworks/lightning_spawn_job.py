# What a Trainer returns in the process of the script, after ranks that it started itself have trained.
# Touches Lightning; imports farandole only for a strategy that is given as an object.
"""`lightning_spawn_job.py STRATEGY FOLDER`: prints a line of JSON; run once with ddp_spawn and once with ours."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset


class Line(pl.LightningModule):
    """A line through points."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(2, 1)

    def loss(self, batch: Any) -> torch.Tensor:
        """The mean square distance of the points from the line."""
        found: torch.Tensor = (self.layer(batch[0]) - batch[1]).square().mean()
        return found

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """One step."""
        loss = self.loss(batch)
        self.log("train", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        """The same data."""
        self.log("val", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, index: int) -> None:
        """The same, with two warnings; the script wants to see only one."""
        warnings.warn("a warning that the script shows", stacklevel=1)
        warnings.warn("a warning that the script hides", stacklevel=1)
        self.validation_step(batch, index)

    def configure_optimizers(self) -> Any:
        """SGD without momentum."""
        return torch.optim.SGD(self.parameters(), 0.05)


def chosen(name: str) -> Any:
    """The strategy by its name, or as an object."""
    if name != "object":
        return name
    from farandole.lightning import FarandoleStrategy

    return FarandoleStrategy()


def asked(trainer: pl.Trainer) -> list[Any]:
    """What scripts ask a trainer about ranks and devices."""
    ranks = [trainer.world_size, trainer.num_devices, trainer.num_nodes, trainer.global_rank, trainer.local_rank]
    return [*ranks, trainer.node_rank, trainer.is_global_zero, list(map(str, trainer.device_ids))]


def main() -> None:
    """Trains, and reads what scripts read afterwards."""
    folder = Path(sys.argv[2])
    x = torch.randn(32, 2, generator=torch.Generator().manual_seed(1))
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4)
    best = ModelCheckpoint(folder, monitor="val", filename="{epoch}", save_top_k=1)
    stop = EarlyStopping("val", patience=5)
    line = Line()
    trainer = pl.Trainer(
        strategy=chosen(sys.argv[1]),
        devices=2,
        accelerator="cpu",
        max_epochs=2,
        callbacks=[best, stop],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    before = asked(trainer)
    trainer.fit(line, data, data)
    report: dict[str, Any] = {
        "pid": os.getpid(),
        "asked": [before, asked(trainer)],
        "metrics": {name: round(float(value), 4) for name, value in sorted(trainer.callback_metrics.items())},
        "best": Path(best.best_model_path).name,
        "same best": trainer.checkpoint_callback.best_model_path == best.best_model_path,  # type: ignore[union-attr]
        "there": sorted(path.name for path in folder.glob("*.ckpt")),
        "state": [str(trainer.state.fn), str(trainer.state.status), trainer.state.finished, trainer.interrupted],
        "weights": [round(float(value), 4) for value in line.layer.weight.detach().flatten()],
        "devices": sorted({str(param.device) for param in line.parameters()}),
        "loaded": torch.load(best.best_model_path, weights_only=False)["epoch"],
    }
    if sys.argv[1] == "farandole":  # the same data, in ranks of its own once more
        warnings.filterwarnings("ignore", message="a warning that the script hides")
        [tested] = trainer.test(line, data, ckpt_path="best", verbose=False)
        assert round(tested["val"], 4) == report["metrics"]["val"], (tested, report)
    print("said " + json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
