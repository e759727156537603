# Training on shards against one process on the whole batch, and a long run in which nothing is regular.
# Touches farandole.torch as users see it. Started by test_torch_training.py.
"""`python torch_training_cases.py shards|chaos`: a line of JSON per rank."""

from __future__ import annotations

import copy
import gc
import json
import os
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import farandole.torch as hvd
from farandole.world.runtime import runtime

STEPS = 50
ROWS = 11  # uneven on 2 and on 3 ranks


class Cnn(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, bias=False)
        self.norm = norm(4)
        self.last = nn.Linear(4 * 16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.conv(x))).flatten(1))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 8)
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
        )
        self.last = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers(self.words(x)).mean(1))


class Sparse(nn.Module):
    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 8, sparse=sparse)
        self.last = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.words(x)).sum(1))


def models(kind: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """A model for the whole batch, and an equal one for shards."""
    torch.manual_seed(3)
    if kind == "cnn":
        whole: nn.Module = Cnn(nn.BatchNorm2d)
        shards: nn.Module = Cnn(hvd.SyncBatchNorm)
        shards.load_state_dict(whole.state_dict())
    elif kind == "sparse as dense":
        whole, shards = Sparse(False), Sparse()
        shards.load_state_dict(whole.state_dict())
    else:
        whole = Transformer() if kind == "transformer" else Sparse()
        shards = copy.deepcopy(whole)
    return whole.to(dtype), shards.to(dtype)


def batch(kind: str, step: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    y = torch.randint(0, 5, (ROWS,), generator=generator)
    if kind == "cnn":
        return torch.randn(ROWS, 1, 6, 6, generator=generator, dtype=torch.float64).to(dtype), y
    return torch.randint(0, 12, (ROWS, 5), generator=generator), y


def optimizers(kind: str, dtype: torch.dtype) -> dict[str, Callable[[Any], torch.optim.Optimizer]]:
    made: dict[str, Callable[[Any], torch.optim.Optimizer]] = {}
    if kind != "sparse as dense":
        made["SGD"] = lambda params: torch.optim.SGD(params, lr=0.05)
    if dtype == torch.float64:
        made["momentum"] = lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9)
        if kind == "sparse":
            # Adam and AdamW take no sparse gradients: they train the same model by sparse_as_dense.
            made["SparseAdam"] = lambda params: torch.optim.SparseAdam([next(iter(params))], lr=1e-3)
        else:
            made["Adam"] = lambda params: torch.optim.Adam(params, lr=1e-3)
            made["AdamW"] = lambda params: torch.optim.AdamW(params, lr=1e-3)
    return made


def train_both(kind: str, name: str, make: Any, dtype: torch.dtype) -> float:
    """The largest difference between the parameters, and running statistics, after all steps."""
    whole, shards = models(kind, dtype)
    plain = make(whole.parameters())
    distributed = hvd.DistributedOptimizer(make(shards.parameters()), sparse_as_dense=kind == "sparse as dense")
    bounds = [ROWS * rank // hvd.size() for rank in range(hvd.size() + 1)]
    local = slice(bounds[hvd.rank()], bounds[hvd.rank() + 1])
    for step in range(STEPS):
        x, y = batch(kind, step, dtype)
        plain.zero_grad()
        cross_entropy(whole(x), y).backward()
        plain.step()
        distributed.zero_grad()
        # The loss of a shard is weighted by its number of rows.
        loss = cross_entropy(shards(x[local]), y[local], reduction="sum") * (hvd.size() / ROWS)
        loss.backward()
        distributed.step()
    trained = [param for group in distributed.param_groups for param in group["params"]]
    flat = torch.cat([param.detach().reshape(-1) for param in trained])
    all_values = hvd.allgather(flat[None], name=f"{kind}.{name}.{dtype}")
    assert all(torch.equal(row, all_values[0]) for row in all_values), f"{kind} {name}: bits differ between ranks"
    reference = [param for group in plain.param_groups for param in group["params"]]
    start = torch.cat([param.detach().reshape(-1) for param in models(kind, dtype)[0].parameters()])
    assert not torch.equal(start[: len(flat)], flat), "nothing was learnt"
    pairs = [*zip(trained, reference, strict=True), *zip(shards.buffers(), whole.buffers(), strict=True)]
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def shards() -> dict[str, float]:
    return {
        f"{kind} {name} {dtype}": train_both(kind, name, make, dtype)
        for kind in ("cnn", "transformer", "sparse", "sparse as dense")
        for dtype in (torch.float64, torch.float32)
        for name, make in optimizers(kind, dtype).items()
    }


# --- nothing is regular ----------------------------------------------------------------------------------------------


class IrregularModel(nn.Module):
    """Layers that run in any order, or not at all."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(8)])
        self.wide = nn.Linear(6, 20000)  # too large to be deferred
        self.words = nn.Embedding(20, 6, sparse=True)

    def forward(self, random_numbers: random.Random) -> torch.Tensor:
        x = torch.ones(6)
        for index in random_numbers.sample(range(8), random_numbers.randrange(9)):
            x = torch.tanh(self.layers[index](x))
        if random_numbers.random() < 0.5:
            x = x + self.words(torch.tensor([random_numbers.randrange(20)]))[0]
        if random_numbers.random() < 0.5:
            x = x + self.wide(x).mean()
        return x.sum()


class SetOfRanks:
    """A process set with a model and an optimizer of its own."""

    def __init__(self, ranks: list[int], seed: int, random_numbers: random.Random) -> None:
        everyone = len(ranks) == hvd.size()
        self.set = hvd.global_process_set if everyone else hvd.add_process_set(ranks)
        self.ranks = ranks
        self.model = IrregularModel(seed)
        groups = random_numbers.choice([None, None, 3])
        self.optimizer = None
        if hvd.rank() in ranks:
            self.optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(self.model.parameters(), lr=0.01),
                self.model.named_parameters(),
                groups=groups,
                process_set=self.set,
            )

    def step(self, random_numbers: random.Random, keep: bool) -> None:
        assert self.optimizer is not None
        self.optimizer.zero_grad(set_to_none=not keep)
        loss = self.model(random_numbers)
        if loss.requires_grad:
            loss.backward()
        self.optimizer.step()

    def check(self) -> None:
        flat = torch.cat([param.detach().reshape(-1) for param in self.model.parameters()])
        if hvd.rank() in self.ranks:
            all_values = hvd.allgather(flat[None], process_set=self.set)
            assert all(torch.equal(row, all_values[0]) for row in all_values), (
                f"one_set {self.ranks}: parameters differ"
            )

    def end(self) -> None:
        self.check()
        self.optimizer = None
        if self.set is not hvd.global_process_set:
            assert hvd.remove_process_set(self.set)


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def threads_and_descriptors() -> tuple[int, int]:
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def chaos() -> dict[str, Any]:
    shared, own_random = random.Random(5), random.Random(hvd.rank())
    choices = [ranks for ranks in ([0, 1], [0, 2], [1, 2]) if ranks[-1] < hvd.size()] if hvd.size() > 2 else []
    sets = [SetOfRanks(list(range(hvd.size())), 0, shared)]
    before, size = threads_and_descriptors(), 0
    for step in range(300):
        if step == 100:
            gc.collect()
            size, before = resident(), threads_and_descriptors()
        if step % 20 == 10:
            while len(sets) > 1:
                sets.pop().end()
            for ranks in shared.sample(choices, min(len(choices), shared.randrange(1, 3))):
                sets.append(SetOfRanks(ranks, step, shared))
        active = shared.sample(sets, shared.randrange(1, len(sets) + 1))
        keep = shared.random() < 0.3
        for one_set in active:
            if one_set.optimizer is not None:
                one_set.step(own_random, keep)
    for one_set in sets[::-1]:
        one_set.end()
    gc.collect()
    engine = runtime.world.engine
    grown = resident() - size
    assert grown < 16 << 20, f"{grown} bytes more than 200 steps before"
    threads, descriptors = threads_and_descriptors()
    assert threads <= before[0] and descriptors <= before[1] + 12, (before, threads, descriptors)
    assert not runtime.world.handles and not getattr(engine, "pending", 0)
    return {"grown": grown, **{name: engine.counter(name) for name in ("planned_buckets", "negotiated_buckets")}}


def main() -> int:
    torch.set_num_threads(1)
    hvd.init(process_sets="dynamic")
    print(json.dumps({"shards": shards, "chaos": chaos}[sys.argv[1]]()), flush=True)
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
