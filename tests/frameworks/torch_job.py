# What the cases of DistributedOptimizer share: small models, comparisons, the list of cases and how a rank runs them.
# Touches farandole.torch as users see it.
"""`run(wanted)`: all cases one after the other; a line of JSON per rank says what became of each."""

from __future__ import annotations

import copy
import json
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import farandole.torch as hvd
from farandole.world.runtime import runtime

CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


def raises(kind: type[BaseException], text: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    try:
        call(*args, **kwargs)
    except kind as error:
        assert text in str(error), f"{text!r} is not in {str(error)!r}"
    else:
        raise AssertionError(f"no {kind.__name__}")


def small_model(seed: int = 1, width: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2)).double()


def data(seed: int, rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def loss_on(model: nn.Module, seed: int) -> torch.Tensor:
    return model(data(seed)).square().mean()


def expected_grads(model: nn.Module, seeds: list[int], ranks: list[int], share: float) -> list[Any]:
    """The sum over ranks and passes, times `share`, computed here."""
    twin = copy.deepcopy(model)
    twin.zero_grad()
    for rank in ranks:
        for seed in seeds:
            (loss_on(twin, 100 * seed + rank) * share).backward()
    return [param.grad for param in twin.parameters()]


def same(tensors: Any, others: Any, tolerance: float = 1e-12) -> None:
    for one, other in zip(tensors, others, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def grads_of(model: nn.Module) -> list[Any]:
    return [param.grad for param in model.parameters()]


def equal_everywhere(model: nn.Module) -> None:
    flat = torch.cat([param.detach().reshape(-1) for param in model.parameters()])
    all_values = hvd.allgather(flat[None])
    assert all(torch.equal(row, all_values[0]) for row in all_values), "parameters differ between ranks"


def wrap(model: nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)


def backward(model: nn.Module, seed: int) -> None:
    loss_on(model, 100 * seed + hvd.rank()).backward()


def synchronized(model: nn.Module, optimizer: Any, seed: int, **zero: Any) -> None:
    """One step's gradients of all ranks, which are checked."""
    optimizer.zero_grad(**zero)
    wanted = expected_grads(model, [seed], list(range(hvd.size())), 1 / hvd.size())
    backward(model, seed)
    optimizer.synchronize()
    same(grads_of(model), wanted)


def apply(optimizer: Any) -> None:
    """A step with the gradients as they are."""
    with optimizer.skip_synchronize():
        optimizer.step()


def take_steps(model: nn.Module, optimizer: Any, count: int) -> None:
    for step in range(count):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


class Branches(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList([nn.Linear(4, 4, dtype=torch.float64) for _ in range(4)])
        self.words = nn.Embedding(10, 4, sparse=sparse, dtype=torch.float64)

    def forward(self, order: list[int], words: list[int]) -> torch.Tensor:
        x = torch.ones(4, dtype=torch.float64)
        for index in order:
            x = torch.tanh(self.layers[index](x))
        if words:
            x = x + self.words(torch.tensor(words)).sum(0)
        return x.sum()


def run(wanted: list[str]) -> int:
    torch.set_num_threads(1)
    hvd.init(process_sets="dynamic")
    found: dict[str, Any] = {}
    for name in wanted or CASES:
        try:
            found[name] = CASES[name]() or "ok"
        except BaseException:
            found[name] = traceback.format_exc()
            print(json.dumps({name: found[name]}), flush=True)
            return 1
        hvd.barrier()
    engine = runtime.world.engine
    found["left behind"] = len(runtime.world.handles) + getattr(engine, "pending", 0)
    print(json.dumps(found), flush=True)
    hvd.shutdown()
    return 0
