# A rank that trains with and without shard_optimizer_state, saves the state, or continues from one.
# Touches farandole.torch as users see it.
"""`python torch_sharding_job.py FILE`: without FILE it saves there, with it it loads; asserts by itself."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import farandole.torch as hvd

KINDS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
}


def model_of() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 17), nn.Tanh(), nn.Linear(17, 5))


def train(kind: str, sharded: bool, state: Any = None, steps: int = 4, clip: float | None = None) -> Any:
    model = model_of()
    optimizer = KINDS[kind](model.parameters())
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), shard_optimizer_state=sharded)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(step)  # all ranks together have the same batch, whatever their number
        x = torch.randn(12, 8).chunk(hvd.size())[hvd.rank()]
        model(x).pow(2).mean().backward()
        if clip is not None and sharded:
            optimizer.clip_grad_norm_(clip)
            optimizer.step()
        elif clip is not None:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        scheduler.step()
    return model, optimizer


def equal(first: Any, other: Any) -> None:
    if isinstance(first, torch.Tensor):
        torch.testing.assert_close(first, other)
    elif isinstance(first, dict):
        assert first.keys() == other.keys(), (first.keys(), other.keys())
        for key in first:
            equal(first[key], other[key])
    elif isinstance(first, list | tuple):
        assert len(first) == len(other)
        for one, two in zip(first, other, strict=True):
            equal(one, two)
    else:
        assert first == other, (first, other)


def elements(optimizer: Any) -> int:
    """Elements of state that this rank holds."""
    return sum(
        value.numel() for items in optimizer.state.values() for value in items.values() if torch.is_tensor(value)
    )


def refused(**options: Any) -> None:
    for kind in (torch.optim.LBFGS, torch.optim.Adafactor):
        model = model_of()
        try:
            hvd.DistributedOptimizer(kind(model.parameters()), shard_optimizer_state=True)
        except ValueError as error:
            assert kind.__name__ in str(error)
        else:
            raise AssertionError(kind)


def main(path: str) -> None:
    hvd.init()
    refused()
    kept = torch.load(path, weights_only=False) if os.path.exists(path) else {}
    hvd.barrier()
    found = {}
    for kind in KINDS:
        for clip in (None, 0.05):
            plain = train(kind, False, kept.get(kind), clip=clip)
            shared = train(kind, True, kept.get(kind), clip=clip)
            equal(plain[0].state_dict(), shared[0].state_dict())
            equal(plain[1].state_dict(), shared[1].state_dict())
            assert elements(shared[1]) <= elements(plain[1]) / hvd.size() + 16, (elements(shared[1]), kind)
        found[kind] = {"model": shared[0].state_dict(), "optimizer": shared[1].state_dict()}
    if hvd.rank() == 0 and not kept:
        torch.save(found, path)
    hvd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
