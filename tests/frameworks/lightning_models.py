# Small modules, data and trainers for the tests with Lightning.
# Touches Lightning and torch; writes below the folder SCRATCH.
"""`trainer(kind, ...)` makes the same trainer on Lightning's own DDP with Gloo ("ddp") and on ours ("ours")."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import MeanAbsoluteError

SCRATCH = Path(os.environ["SCRATCH"])
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def data(count: int = 48, seed: int = 5) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=draw)
    return TensorDataset(x, x.sum(1, keepdim=True) + 0.1 * torch.randn(count, 1, generator=draw))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))


def strategy(kind: str) -> Any:
    return DDPStrategy(process_group_backend="gloo", find_unused_parameters=True) if kind == "ddp" else "farandole"


def trainer(kind: str, **options: Any) -> pl.Trainer:
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
    chosen: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "max_epochs": 2, **quiet, **options}
    chosen.setdefault("strategy", strategy(kind))
    # Horovod's users write devices=1, whatever the number of ranks.
    return pl.Trainer(accelerator="cpu", devices=SIZE if kind == "ddp" else 1, **chosen)


class Regression(pl.LightningModule):
    """Logs with and without sync_dist, has a metric, a scheduler and everything that trainers call."""

    def __init__(self, rate: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = net()
        self.error = MeanAbsoluteError()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        loss = mse_loss(self.net(x), y)
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        guess = self.net(x)
        self.log("val_loss", mse_loss(guess, y), sync_dist=True)
        self.error(guess, y)
        self.log("val_error", self.error)
        self.log("val_most", guess.max(), sync_dist=True, reduce_fx="max")

    test_step = validation_step

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams["rate"], momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Gan(pl.LightningModule):
    """Manual optimization: two optimizers with schedulers, one of them toggled, and clipping by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = net(), nn.Linear(1, 1)

    def training_step(self, batch: Any, index: int) -> None:
        x, y = batch
        optimizers: Any = self.optimizers()
        first, second = optimizers
        for optimizer in (first, second):
            self.toggle_optimizer(optimizer)
            made = self.generator(x)
            if optimizer is first:
                loss = mse_loss(self.critic(made), torch.ones_like(y))
            else:
                loss = mse_loss(self.critic(y), torch.ones_like(y)) + self.critic(made.detach()).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.log(f"loss{optimizer is first}", loss, sync_dist=True)
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.generator.parameters(), 0.01)
        second = torch.optim.SGD(self.critic.parameters(), 0.1, momentum=0.5)
        make = torch.optim.lr_scheduler.ExponentialLR
        return [first, second], [make(first, 0.9), make(second, 0.8)]


def weights(module: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def fresh(kind: type[Any] = Regression, **options: Any) -> Any:
    """The same module on all ranks, in every run; then each rank its own, so that a missing broadcast shows."""
    torch.manual_seed(3)
    module = kind(**options)
    if RANK:
        with torch.no_grad():
            for param in module.parameters():
                param.add_(RANK)
    return module


def loader(count: int = 48, **options: Any) -> DataLoader[Any]:
    return DataLoader(data(count), 4, **{"shuffle": True, **options})


def ordered(count: int) -> DataLoader[Any]:
    """In the order of the data: Lightning's own sampler shuffles whatever is trained on."""
    numbers = data(count)
    return DataLoader(numbers, 4, sampler=DistributedSampler(numbers, SIZE, RANK, shuffle=False))
