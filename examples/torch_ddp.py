"""Trains a small network on scikit-learn's handwritten digits, and saves it with --save. It is here three times:
torch_single.py for one process, torch_digits.py for any number of them, torch_ddp.py with DistributedDataParallel."""

import argparse
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch", type=int, default=50, help="images per process and step")
parser.add_argument("--rate", type=float, default=0.05)
parser.add_argument("--save", metavar="FILE", help="where the trained model goes")
options = parser.parse_args()

torch.manual_seed(1)
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
else:
    device = torch.device("cpu")
    dist.init_process_group("gloo")
first = dist.get_rank() == 0  # the process that prints and saves

digits = load_digits()
order = torch.randperm(len(digits.target))
images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)[order]
labels = torch.tensor(digits.target)[order]
train, test = TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])
sampler = torch.utils.data.DistributedSampler(train)
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
model = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
optimizer = torch.optim.SGD(model.parameters(), lr=options.rate * dist.get_world_size(), momentum=0.9)

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
    torch.save(model.module.state_dict(), options.save)
dist.destroy_process_group()
