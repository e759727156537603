# The program of the fault test of sharded optimizers: gradients of whole numbers, so that any ranks give the same bits.
# Touches farandole.torch as users see it, and files in a scratch directory.
"""Each step sums the same samples, on any ranks. At the end the weights are those of plain Adam, to the bit."""

from __future__ import annotations

import hashlib
import random
import time
from typing import Any

import torch
from elastic_files import agreed, begin, finishing, leave, tell

import farandole.torch as hvd
from farandole.elastic import commits, memory

COMMIT_EVERY = 3
BATCH = 6
SHAPES = [(7, 5), (3,), (11, 13), (1,)]


def samples(step: int) -> list[list[torch.Tensor]]:
    """For each sample of a step's batch, its gradient for each parameter: small whole numbers."""
    draw = torch.Generator().manual_seed(step)
    return [[torch.randint(-9, 10, shape, generator=draw).float() for shape in SHAPES] for _ in range(BATCH)]


def parameters() -> list[torch.nn.Parameter]:
    draw = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=draw)) for shape in SHAPES]


def backward(params: list[torch.nn.Parameter], step: int, rank: int, size: int) -> None:
    """The loss of this rank's share of the batch; a rank without samples has gradients of zeros."""
    local = samples(step)[rank::size]
    total: Any = sum((param * 0.0).sum() for param in params)
    for sample in local:
        total = total + sum((param * values).sum() for param, values in zip(params, sample, strict=True))
    total.backward()


def made(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": params[:2]}, {"params": params[2:], "lr": 0.003}]
    return torch.optim.Adam(groups, lr=0.01)


def plain(steps: int) -> tuple[list[torch.nn.Parameter], Any]:
    """The same training in one process, without any of this package."""
    params = parameters()
    optimizer = made(params)
    for step in range(steps):
        optimizer.zero_grad()
        backward(params, step, 0, 1)
        for group in optimizer.param_groups:
            group["lr"] *= 0.999
        optimizer.step()
    return params, optimizer


def as_plain(params: list[torch.nn.Parameter], whole: Any, steps: int) -> dict[str, bool]:
    """Whether weights, moments and learning rates are those of the plain training, to the bit."""
    expected, optimizer = plain(steps)
    calm = optimizer.state_dict()
    pairs = [(value, whole["state"][at][key]) for at, items in calm["state"].items() for key, value in items.items()]
    return {
        "weights": all(map(torch.equal, params, expected)),
        "state": len(pairs) == 3 * len(SHAPES) and all(torch.equal(one, other) for one, other in pairs),
        "rates": [group["lr"] for group in whole["param_groups"]] == [group["lr"] for group in calm["param_groups"]],
    }


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    params = parameters()
    model = torch.nn.ParameterList(params)
    optimizer: Any = hvd.DistributedOptimizer(made(params), op=hvd.Sum, shard_optimizer_state=True)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0, sizes=[])
    floor = [0]  # the last step that this process knows to be committed

    @hvd.elastic.run
    def train(state: Any) -> None:
        assert state.step >= floor[0], f"committed step {floor[0]} was lost: this is step {state.step}"
        begin()
        while not agreed(finishing()):
            optimizer.zero_grad()
            backward(params, state.step, hvd.rank(), hvd.size())
            for group in optimizer.param_groups:
                group["lr"] *= 0.999
            optimizer.step()
            state.step += 1
            state.sizes.append(hvd.size())
            tell(state.step, commits=commits(state))
            time.sleep(0.03 * random.random())  # sleep: cores for those who are being started
            if state.step % COMMIT_EVERY == 0:
                state.commit()
                floor[0] = state.step

    train(state)
    whole = optimizer.state_dict()
    leave(
        plain=as_plain(params, whole, state.step) if hvd.rank() == 0 else {},
        weights=hashlib.sha256(b"".join(param.detach().numpy().tobytes() for param in params)).hexdigest(),
        counted=[int(items["step"]) for items in whole["state"].values()],
        steps=state.step,
        sizes=state.sizes,
        memory=memory(state),
    )


if __name__ == "__main__":
    main()
