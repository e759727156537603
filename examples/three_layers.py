"""Three layers, each of which can be swapped: Lightning trains, Ray runs the workers, Farandole moves the gradients.
Run it as it is, `python examples/three_layers.py`, or on a cluster: RAY_ADDRESS says where that is."""

import argparse

import lightning.pytorch as pl
import ray
import torch
from farandole.ray import HorovodTrainer, prepare_trainer
from ray.train import RunConfig, ScalingConfig
from ray.train.lightning import RayTrainReportCallback
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


class Digits(pl.LightningModule):  # the application
    """A network of four million parameters for scikit-learn's handwritten digits."""

    def __init__(self):
        super().__init__()
        hidden = [torch.nn.Linear(64, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 2048), torch.nn.ReLU()]
        self.net = torch.nn.Sequential(*hidden, torch.nn.Linear(2048, 10))

    def training_step(self, batch, index):
        loss = cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def train_dataloader(self):
        images, labels = load_digits(return_X_y=True)
        return DataLoader(TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels)), 256, shuffle=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def train_func(config):
    """Runs on every worker; `strategy` is the communication."""
    trainer = pl.Trainer(
        strategy="horovod", accelerator="auto", devices=1, max_epochs=config["epochs"],
        callbacks=[RayTrainReportCallback()], logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    prepare_trainer(trainer).fit(Digits())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--storage", help="a folder for checkpoints, which all nodes can reach")
    options = parser.parse_args()
    ray.init()
    scaling = ScalingConfig(num_workers=options.workers)  # the orchestration
    run = RunConfig(storage_path=options.storage)
    result = HorovodTrainer(train_func, train_loop_config=vars(options), scaling_config=scaling, run_config=run).fit()
    print(
        f"loss {result.metrics['loss']:.3f} after {result.metrics['epoch'] + 1} epochs, checkpoint {result.checkpoint}"
    )
