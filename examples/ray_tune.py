"""Ray Tune looks for a learning rate: each trial is a HorovodTrainer with its own workers; bad ones are stopped early.
Run it as it is, `python ray_tune.py`, or on a cluster: RAY_ADDRESS says where that is."""

import argparse
import os
import tempfile

import ray
import ray.train
from farandole.ray import HorovodTrainer
from ray import tune
from ray.train import RunConfig, ScalingConfig
from ray.tune.integration.ray_train import TuneReportCallback
from ray.tune.schedulers import ASHAScheduler


def train(config: dict) -> None:
    """Runs on every worker of a trial, and reports after each epoch."""
    import horovod.torch as hvd
    import torch
    from sklearn.datasets import load_digits
    from torch.nn.functional import cross_entropy

    hvd.init()
    torch.manual_seed(1)
    digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(digits[0] / 16, dtype=torch.float32), torch.tensor(digits[1])
    mine = range(hvd.rank(), 1500, hvd.size())

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["rate"], momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    for _ in range(config["epochs"]):
        for some in torch.utils.data.DataLoader(mine, batch_size=25):
            optimizer.zero_grad()
            cross_entropy(model(images[some]), labels[some]).backward()
            optimizer.step()
        with torch.no_grad():
            right = (model(images[1500:]).argmax(dim=1) == labels[1500:]).float().mean().item()
        ray.train.report({"accuracy": right})


def trial(config: dict) -> None:
    """What Tune runs: a trainer whose reports go to Tune."""
    HorovodTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=config["storage"], callbacks=[TuneReportCallback()]),
    ).fit()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()

    # A trial takes one CPU of Ray's, its workers two; without Ray's dashboard a stopped trial's workers keep theirs.
    # More than the machine has only makes it slower.
    ray.init(num_cpus=None if "RAY_ADDRESS" in os.environ else 1 + 2 * options.trials)
    with tempfile.TemporaryDirectory() as storage:
        rates = [0.1 / 10**power for power in range(options.trials)]
        tuner = tune.Tuner(
            trial,
            param_space={"rate": tune.grid_search(rates), "epochs": options.epochs, "storage": storage},
            tune_config=tune.TuneConfig(
                metric="accuracy",
                mode="max",
                scheduler=ASHAScheduler(max_t=options.epochs + 1, grace_period=1, reduction_factor=2),
                max_concurrent_trials=1,
            ),
            run_config=tune.RunConfig(storage_path=os.path.join(storage, "tune"), verbose=0),
        )
        results = tuner.fit()
        best = results.get_best_result()
        early = sum(one.metrics["training_iteration"] < options.epochs for one in results)
    print(f"{early} of {len(rates)} trials were stopped early")
    print(f"best rate {best.config['rate']:g}: accuracy {best.metrics['accuracy']:.1%}")
