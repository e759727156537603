"""Optimizers with unusual states and options: rank 0 has trained, the others have trained differently or not at all.
After the broadcast all have rank 0's state, with its types, and train on alike."""

import copy

import torch
import torch.nn as nn

import horovod.torch as hvd

hvd.init()
rank = hvd.rank()
torch.set_num_threads(1)


class Preconditioned(torch.optim.Optimizer):
    """Keeps lists and dicts of tensors that have another type than the parameters, words, and an entry of its own."""

    def __init__(self, params, lr=0.1, betas=(0.9, 0.99), mode="fast", flag=True, nothing=None):
        super().__init__(params, {"lr": lr, "betas": betas, "mode": mode, "flag": flag, "nothing": nothing})
        self.state["steps"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.state["steps"] += 1
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p)
                    state["factors"] = [torch.zeros(2), torch.eye(3, dtype=torch.float16)]
                    state["more"] = {"count": 0, "sums": torch.zeros(2, dtype=torch.int64), "note": "young"}
                    state["nothing"] = None
                    state["mode"] = group["mode"]
                state["average"].mul_(0.9).add_(p.grad)
                state["factors"][0] += 1.0 / 3.0
                state["more"]["count"] += 1
                state["more"]["sums"] += 1
                state["more"]["note"] = "old"
                p.add_(state["average"], alpha=-group["lr"] / state["factors"][0][0].item())


KINDS = {
    "Preconditioned": Preconditioned,
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1, amsgrad=True),
    "Adam, a tensor as rate": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.1), foreach=False),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
    "RMSprop": lambda params: torch.optim.RMSprop(params, momentum=0.9, centered=True),
}


def same(one, other, where):
    assert type(one) is type(other), (where, one, other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other), (where, one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for number, (mine, theirs) in enumerate(zip(one, other)):
            same(mine, theirs, f"{where}.{number}")
    else:
        assert one == other, (where, one, other)


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3, dtype=torch.float64) * (rank + 1)).sum().backward()
        optimizer.step()


for name, kind in KINDS.items():
    for root_alone in (False, True):
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        optimizer = kind(
            [{"params": model[0].parameters(), "lr": 0.05 * (rank + 1)}, {"params": model[2].parameters()}]
        )
        if rank == 0 or not root_alone:
            train(model, optimizer, 2 + rank)
        before = copy.deepcopy(optimizer.state_dict())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        states = hvd.allgather_object((before, optimizer.state_dict()))
        for number, (_, after) in enumerate(states):
            same(states[0][0], after, f"{name} on rank {number}")
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        train(model, optimizer, 2)
        weights = hvd.allgather(model[0].weight.detach()[None])
        for number in range(hvd.size()):
            assert torch.equal(weights[number], weights[0]), name
