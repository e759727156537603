"""A Horovod script on Ray: the workers of a RayExecutor are Ray actors and train a small network together.
Run it as it is, `python ray_torch.py`, or on a cluster: RAY_ADDRESS says where that is."""

import argparse

import ray
from farandole.ray import RayExecutor


def train(epochs: int, rate: float) -> float:
    """Runs on every worker, and is an ordinary script for Horovod."""
    import horovod.torch as hvd
    import torch
    from sklearn.datasets import load_digits
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    hvd.init()
    torch.manual_seed(1)
    digits = load_digits(return_X_y=True)
    order = torch.randperm(len(digits[1]))
    images, labels = torch.tensor(digits[0] / 16, dtype=torch.float32)[order], torch.tensor(digits[1])[order]
    data = TensorDataset(images[:1500], labels[:1500])
    sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for image, label in DataLoader(data, batch_size=25, sampler=sampler):
            optimizer.zero_grad()
            cross_entropy(model(image), label).backward()
            optimizer.step()
    with torch.no_grad():
        return (model(images[1500:]).argmax(dim=1) == labels[1500:]).float().mean().item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--rate", type=float, default=0.05)
    options = parser.parse_args()

    ray.init()
    settings = RayExecutor.create_settings(timeout_s=60)
    executor = RayExecutor(settings, num_workers=options.workers)
    executor.start()
    accuracies = executor.run(train, args=[options.epochs, options.rate])
    executor.shutdown()
    print(f"accuracy {accuracies[0]:.1%} on {len(accuracies)} workers")
