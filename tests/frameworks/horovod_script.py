"""An elastic script as Horovod's users write it: nothing but horovod.torch, a commit every 10 batches.
It counts the samples behind the model, writes its progress into a file, and ends when another file exists."""

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import horovod.torch as hvd

SCRATCH = Path(os.environ["SCRATCH"])
SAMPLES = 403

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(1)
x = torch.randn(SAMPLES, 8)
y = (x @ torch.randn(8, 3)).argmax(1)
dataset = TensorDataset(torch.arange(SAMPLES), x, y)
sampler = hvd.elastic.ElasticSampler(dataset)
loader = DataLoader(dataset, batch_size=4, sampler=sampler)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
loss_of = nn.CrossEntropyLoss()
changes: list[int] = []


def on_state_reset() -> None:
    changes.append(hvd.size())
    for group in optimizer.param_groups:
        group["lr"] = 0.02 * hvd.size()


def tell(state: Any, pids: list[int]) -> None:
    if hvd.rank() == 0:
        progress = {
            "epoch": state.epoch,
            "step": state.steps,
            "size": hvd.size(),
            "pids": pids,
            "time": time.monotonic(),
        }
        (SCRATCH / "new").write_text(json.dumps({**progress, "generation": state.rounds}))
        os.rename(SCRATCH / "new", SCRATCH / "progress")


@hvd.elastic.run
def train(state: Any) -> None:
    pids = hvd.allgather_object(os.getpid())
    state.rounds += 1
    done = False
    while not done:
        for batch, (number, data, target) in enumerate(loader):
            optimizer.zero_grad()
            loss = loss_of(model(data), target)
            loss.backward()
            optimizer.step()
            seen = hvd.allreduce(torch.bincount(number, minlength=SAMPLES), op=hvd.Sum)
            state.seen = state.seen + seen
            state.sampler.record_batch(batch, len(data))
            state.batch, state.steps = batch, state.steps + 1
            tell(state, pids)
            if batch % 10 == 0:
                state.commit()
        state.epoch += 1
        state.batch = 0
        state.sampler.set_epoch(state.epoch)
        done = bool(hvd.broadcast_object((SCRATCH / "finish").exists(), root_rank=0))
        state.commit()


state = hvd.elastic.TorchState(
    model=model,
    optimizer=optimizer,
    sampler=sampler,
    epoch=0,
    batch=0,
    steps=0,
    rounds=0,
    seen=torch.zeros(SAMPLES, dtype=torch.int64),
)
state.register_reset_callbacks([on_state_reset])
train(state)

right = (model(x).argmax(1) == y).float().mean().item()
extra = int((state.seen - state.epoch).clamp(min=0).sum())
result = {"epochs": state.epoch, "least": int(state.seen.min()), "extra": extra, "right": right, "changes": changes}
(SCRATCH / f"result.{hvd.rank()}").write_text(json.dumps(result))
