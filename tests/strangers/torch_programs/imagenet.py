"""The ImageNet script's habits: several batches per allreduce, warm-up of the learning rate by hand, a checkpoint that
rank 0 writes and a restart that reads it, accuracy through a Metric class."""

import math
import os
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim

import horovod.torch as hvd

batch_size, batches_per_allreduce, base_lr, warmup_epochs, epochs = 4, 2, 0.0125, 2, 3
hvd.init()
torch.manual_seed(7)
torch.set_num_threads(1)
allreduce_batch_size = batch_size * batches_per_allreduce
verbose = 1 if hvd.rank() == 0 else 0
# Only rank 0 has the folder; a stranger's script would have a path that all can see.
folder = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None, root_rank=0)
checkpoint_format = os.path.join(folder, "checkpoint-{epoch}.pth.tar")
data = torch.randn(hvd.size() * allreduce_batch_size * 3, 6, dtype=torch.float64)
target = (data.sum(1) > 0).long()
steps = 3


def shard(rank, step):
    start = (step * hvd.size() + rank) * allreduce_batch_size
    return slice(start, start + allreduce_batch_size)


def make_model():
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)).double()


def learning_rate(epoch, step):
    if epoch < warmup_epochs:
        epoch += float(step + 1) / steps
        lr_adj = 1.0 / hvd.size() * (epoch * (hvd.size() - 1) / warmup_epochs + 1)
    else:
        lr_adj = 1e-1
    return base_lr * hvd.size() * batches_per_allreduce * lr_adj


class Metric:
    def __init__(self, name):
        self.name = name
        self.sum = torch.tensor(0.0)
        self.n = torch.tensor(0.0)

    def update(self, val):
        self.sum += hvd.allreduce(val.detach().cpu(), name=self.name)
        self.n += 1

    @property
    def avg(self):
        return self.sum / self.n


def find_last():
    for try_epoch in range(epochs, 0, -1):
        if os.path.exists(checkpoint_format.format(epoch=try_epoch)):
            return try_epoch
    return 0


def run(first, last):
    """A whole life of the script: it goes on where a checkpoint is."""
    resume_from_epoch = find_last() if hvd.rank() == 0 else 0
    resume_from_epoch = hvd.broadcast(torch.tensor(resume_from_epoch), root_rank=0, name="resume_from_epoch").item()
    assert resume_from_epoch == first
    model = make_model()
    optimizer = optim.SGD(model.parameters(), lr=base_lr, momentum=0.9, weight_decay=5e-5)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=batches_per_allreduce
    )
    if resume_from_epoch > 0 and hvd.rank() == 0:
        checkpoint = torch.load(checkpoint_format.format(epoch=resume_from_epoch), weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for epoch in range(resume_from_epoch, last):
        train_loss = Metric("train_loss")
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(epoch, step)
            optimizer.zero_grad()
            x, y = data[shard(hvd.rank(), step)], target[shard(hvd.rank(), step)]
            for i in range(0, len(x), batch_size):
                loss = F.cross_entropy(model(x[i : i + batch_size]), y[i : i + batch_size])
                train_loss.update(loss.float())
                loss.div_(math.ceil(float(len(x)) / batch_size))
                loss.backward()
            optimizer.step()
        if hvd.rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, checkpoint_format.format(epoch=epoch + 1))
        hvd.barrier()
    return model, train_loss.avg


run(0, 2)
model, loss = run(2, epochs)

alone = make_model()
plain = optim.SGD(alone.parameters(), lr=base_lr, momentum=0.9, weight_decay=5e-5)
for epoch in range(epochs):
    for step in range(steps):
        plain.param_groups[0]["lr"] = learning_rate(epoch, step)
        plain.zero_grad()
        for rank in range(hvd.size()):
            where = shard(rank, step)
            (F.cross_entropy(alone(data[where]), target[where]) / hvd.size()).backward()
        plain.step()
for ours, theirs in zip(model.parameters(), alone.parameters()):
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
assert 0.0 < loss < 1.5
hvd.barrier()
if hvd.rank() == 0:
    for epoch in range(1, epochs + 1):
        os.remove(checkpoint_format.format(epoch=epoch))
    os.rmdir(folder)
