"""A model's life on Ray: Ray Data prepares, Tune tries learning rates, Lightning trains on Farandole, Serve answers.
Run it as it is, `python examples/lifecycle.py`, or on a cluster: RAY_ADDRESS says where that is."""

import argparse
import os
import tempfile

import lightning.pytorch as pl
import ray
import torch
from farandole.ray import HorovodTrainer, prepare_trainer
from ray import serve, tune
from ray.train import CheckpointConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayTrainReportCallback
from ray.tune.integration.ray_train import TuneReportCallback
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy


class Digits(pl.LightningModule):
    """A small network for scikit-learn's handwritten digits."""

    def __init__(self, rate):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

    def training_step(self, batch, index):
        return cross_entropy(self.net(batch["image"]), batch["label"])

    def validation_step(self, batch, index):
        right = (self.net(batch["image"]).argmax(1) == batch["label"]).float().mean()
        self.log("accuracy", right, sync_dist=True, batch_size=len(batch["label"]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.hparams.rate, momentum=0.9)


def prepare(batch):
    """What the model wants of raw images; Serve's requests go through it as well."""
    return {**batch, "image": (batch["image"] / 16).astype("float32")}


def train(config):
    """Runs on every worker of a trial: its share of the data, through Ray's loaders."""
    loaders = [ray.train.get_dataset_shard(name).iter_torch_batches(batch_size=25) for name in ("train", "test")]
    trainer = pl.Trainer(
        strategy="horovod", accelerator="auto", devices=1, max_epochs=config["epochs"], num_sanity_val_steps=0,
        callbacks=[RayTrainReportCallback()], logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    prepare_trainer(trainer).fit(Digits(config["rate"]), *loaders)


def trial(config, data):
    """What Tune runs: a trainer with two workers, whose reports go to Tune."""
    keep = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="accuracy")
    HorovodTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=config["storage"], checkpoint_config=keep, callbacks=[TuneReportCallback()]),
        datasets=data,
    ).fit()


@serve.deployment
class Reader:
    """Reads a digit: 64 numbers from 0 to 16."""

    def __init__(self, path):
        self.model = Digits.load_from_checkpoint(path, map_location="cpu").eval()

    def __call__(self, image):
        with torch.no_grad():
            return int(self.model.net(torch.from_numpy(prepare({"image": image})["image"])).argmax())


def main(options, storage):
    """From images to an answer."""
    images, labels = load_digits(return_X_y=True)
    items = [{"image": image, "label": int(label)} for image, label in zip(images, labels, strict=True)]
    learned, kept = ray.data.from_items(items, override_num_blocks=2).map_batches(prepare).train_test_split(0.2)
    results = tune.Tuner(
        tune.with_parameters(trial, data={"train": learned, "test": kept}),
        param_space={"rate": tune.grid_search(options.rates), "epochs": options.epochs, "storage": storage},
        tune_config=tune.TuneConfig(metric="accuracy", mode="max", max_concurrent_trials=1),
        run_config=tune.RunConfig(storage_path=os.path.join(storage, "tune"), verbose=0),
    ).fit()
    best = results.get_best_result(scope="all")
    print(f"best rate {best.config['rate']:g}: accuracy {best.metrics['accuracy']:.1%}")

    serve.start(proxy_location="Disabled")  # programs ask by a handle; without this line there is HTTP as well
    reader = serve.run(Reader.bind(os.path.join(best.metrics["checkpoint_path"], "checkpoint.ckpt")))
    answer = reader.remote(images[0]).result(timeout_s=60)
    print(f"served: that is a {answer}, and it should be a {labels[0]}")
    serve.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.1, 0.001])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--storage", help="a folder that all nodes can reach")
    options = parser.parse_args()
    # One CPU for a trial, two for its workers, the rest for data and Serve; more than there are only makes it slower.
    ray.init(num_cpus=None if "RAY_ADDRESS" in os.environ else 2 + 3 * len(options.rates))
    with tempfile.TemporaryDirectory() as folder:
        main(options, options.storage or folder)
