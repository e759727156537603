"""Trains with Lightning and Farandole; a Lightning script needs only strategy="farandole" in its Trainer. Either the
script starts two ranks: python examples/lightning_digits.py. Or a launcher starts the ranks:
farandole run -np 4 python examples/lightning_digits.py."""

import argparse

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


class Images(pl.LightningDataModule):
    """scikit-learn's handwritten digits; Lightning gives each rank its share of them."""

    def __init__(self, batch: int = 50):
        super().__init__()
        self.batch = batch

    def setup(self, stage):
        digits = load_digits()
        order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(1))
        images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)[order]
        labels = torch.tensor(digits.target)[order]
        self.train = TensorDataset(images[:1500], labels[:1500])
        self.test = TensorDataset(images[1500:], labels[1500:])

    def train_dataloader(self):
        return DataLoader(self.train, self.batch, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.test, self.batch)


class Digits(pl.LightningModule):
    """A small network. Its accuracy is computed over the samples of all ranks."""

    def __init__(self, rate: float = 0.1):
        super().__init__()
        self.rate = rate
        layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)]
        self.net = nn.Sequential(*layers)
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch, index):
        images, labels = batch
        loss = cross_entropy(self.net(images), labels)
        self.log("loss", loss, sync_dist=True, prog_bar=True)
        return loss

    def validation_step(self, batch, index):
        images, labels = batch
        self.accuracy(self.net(images), labels)
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.rate, momentum=0.9)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--devices", type=int, default=2, help="ranks, where no launcher has started them")
    options = parser.parse_args()
    pl.seed_everything(1)
    trainer = pl.Trainer(
        strategy="farandole", accelerator="auto", devices=options.devices, max_epochs=options.epochs,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Digits(), datamodule=Images())
    if trainer.is_global_zero:
        print(f"accuracy {trainer.callback_metrics['accuracy']:.1%} after {trainer.current_epoch} epochs", flush=True)
