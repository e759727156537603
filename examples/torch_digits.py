"""Trains a small network on scikit-learn's handwritten digits, and saves it with --save. It is here three times:
torch_single.py for one process, torch_digits.py for any number of them, torch_ddp.py with DistributedDataParallel."""

import argparse
import time

import farandole.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch", type=int, default=50, help="images per process and step")
parser.add_argument("--rate", type=float, default=0.05)
parser.add_argument("--save", metavar="FILE", help="where the trained model goes")
options = parser.parse_args()

torch.manual_seed(1)
hvd.init()
device = hvd.device()
first = hvd.rank() == 0  # the process that prints and saves

digits = load_digits()
order = torch.randperm(len(digits.target))
images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)[order]
labels = torch.tensor(digits.target)[order]
train, test = TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])
sampler = torch.utils.data.DistributedSampler(train, hvd.size(), hvd.rank())
loader = DataLoader(train, options.batch, sampler=sampler)

model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(32, 64, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(1024, 512),
    nn.ReLU(),
    nn.Linear(512, 10),
).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=hvd.scale_lr(options.rate), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

for epoch in range(options.epochs):
    if epoch == 1 or options.epochs == 1:
        began = time.perf_counter()  # the first epoch warms up
    sampler.set_epoch(epoch)
    for image, label in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(image.to(device)), label.to(device))
        loss.backward()
        optimizer.step()
seconds = (time.perf_counter() - began) / max(1, options.epochs - 1) / len(loader)

with torch.no_grad():
    image, label = test.tensors
    right = (model(image.to(device)).argmax(dim=1) == label.to(device)).float().mean()
if first:
    print(f"accuracy {right:.1%}, {1e3 * seconds:.1f} ms per step of {options.batch} images per process", flush=True)
if first and options.save:
    torch.save(model.state_dict(), options.save)
