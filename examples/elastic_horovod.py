"""An elastic script as Horovod's users have them, unchanged: TorchState, ElasticSampler, a commit every 10 batches.
farandole run -np 2 --min-np 1 --max-np 4 python examples/elastic_horovod.py"""

import argparse

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch", type=int, default=25, help="images per process and step")
parser.add_argument("--rate", type=float, default=0.05)
parser.add_argument("--workers", type=int, default=0, help="processes that load data, for each rank")
options = parser.parse_args()

hvd.init()
torch.manual_seed(1)

digits = load_digits()
order = torch.randperm(len(digits.target))
images = torch.tensor(digits.images / 16, dtype=torch.float32).flatten(1)[order]
labels = torch.tensor(digits.target)[order]
train, test = TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])
sampler = hvd.elastic.ElasticSampler(train)
loader = DataLoader(train, options.batch, sampler=sampler, num_workers=options.workers)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=options.rate * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


@hvd.elastic.run
def learn(state):
    while state.epoch < options.epochs:
        for batch, (image, label) in enumerate(loader):
            optimizer.zero_grad()
            cross_entropy(model(image), label).backward()
            optimizer.step()
            state.sampler.record_batch(batch, len(image))
            state.batch += 1
            if state.batch % 10 == 0:
                state.commit()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()


def resized():
    """The learning rate follows the number of ranks."""
    for group in optimizer.param_groups:
        group["lr"] = options.rate * hvd.size()


state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0)
state.register_reset_callbacks([resized])
learn(state)

with torch.no_grad():
    right = (model(test.tensors[0]).argmax(dim=1) == test.tensors[1]).float().mean()
if hvd.rank() == 0:
    print(f"accuracy {right:.1%} after {state.epoch} epochs on {hvd.size()} ranks", flush=True)
