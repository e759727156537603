"""Vocabulary and arguments from rank 0, results of all ranks as Python objects.
Ends with equal objects everywhere."""

import argparse
import collections

import torch

import horovod.torch as hvd

hvd.init()
args = argparse.Namespace(lr=0.1, layers=[3, 4]) if hvd.rank() == 0 else None
args = hvd.broadcast_object(args, root_rank=0, name="args")
assert args.lr == 0.1 and args.layers == [3, 4]
vocabulary = collections.Counter("the cat and the dog".split()) if hvd.rank() == 0 else None
vocabulary = hvd.broadcast_object(vocabulary)
assert vocabulary["the"] == 2
scores = hvd.allgather_object({"rank": hvd.rank(), "wrong": list(range(hvd.rank()))}, name="scores")
assert [score["rank"] for score in scores] == list(range(hvd.size()))
assert [len(score["wrong"]) for score in scores] == list(range(hvd.size()))
large = hvd.broadcast_object(bytes(300_000) if hvd.rank() == hvd.size() - 1 else b"", root_rank=hvd.size() - 1)
assert len(large) == 300_000
function = hvd.broadcast_object((lambda offset: lambda x: x + offset)(5) if hvd.rank() == 0 else None)
assert function(1) == 6

model = torch.nn.BatchNorm1d(3)
with torch.no_grad():
    model.running_mean.fill_(float(hvd.rank()))
hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.size() - 1)
assert model.running_mean.tolist() == [hvd.size() - 1.0] * 3 and model.num_batches_tracked == 0
hvd.broadcast_parameters(list(model.named_parameters()), root_rank=0)

optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (hvd.rank() + 1), betas=(0.5 + 0.1 * hvd.rank(), 0.9))
if hvd.rank() == 0:  # a checkpoint that only rank 0 has read
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
assert optimizer.param_groups[0]["lr"] == 0.1 and optimizer.param_groups[0]["betas"] == (0.5, 0.9)
other = torch.optim.NAdam(torch.nn.Linear(2, 1).double().parameters())  # has numbers of another type than weights
if hvd.rank() == 0:
    for group in other.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    other.step()
hvd.broadcast_optimizer_state(other, root_rank=0)
kinds = hvd.allgather_object({k: v.dtype for k, v in other.state_dict()["state"][0].items()})
assert len(kinds[0]) >= 4 and all(kind == kinds[0] for kind in kinds), kinds
state = optimizer.state_dict()["state"]
moments = hvd.allgather(state[0]["exp_avg"][None])
assert all(torch.equal(row, moments[0]) for row in moments) and float(state[0]["step"]) == 1.0
