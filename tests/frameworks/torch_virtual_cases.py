# Trains an MLP, a CNN and a transformer in virtual shards; what comes out must not depend on the number of ranks.
# Touches farandole.torch as users see it.
"""Prints a digest of each model's weights, and what virtual shards cost here compared with plain steps."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import farandole.torch as hvd

VIRTUAL = 8
SAMPLES = 100  # not a multiple of a step's 32: the last step of an epoch has shards without samples


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> Any:
        return self.out(self.encoder(self.words(x)).mean(1))


def make(kind: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(1)
    draw = torch.Generator().manual_seed(2)
    if kind == "mlp":
        model: nn.Module = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 5))
        return model, torch.randn(SAMPLES, 12, generator=draw)
    if kind == "cnn":
        model = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.3), nn.Flatten(), nn.Linear(8 * 9, 5)
        )
        return model, torch.randn(SAMPLES, 1, 8, 8, generator=draw)
    return Transformer(), torch.randint(0, 20, (SAMPLES, 6), generator=draw)


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        found.update(tensor.detach().contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


def train(kind: str) -> tuple[str, float]:
    """Digest of the weights after three epochs, and the seconds of a step."""
    model, x = make(kind)
    before = digest(model)
    y = torch.randint(0, 5, (SAMPLES,), generator=torch.Generator().manual_seed(3))
    dataset = torch.utils.data.TensorDataset(x, y)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = hvd.elastic.ElasticDataLoader(dataset, batch_size=4, seed=5, virtual_size=VIRTUAL)
    steps = hvd.elastic.VirtualSteps(model, optimizer, virtual_size=VIRTUAL)
    losses, start = [], time.perf_counter()
    while loader.epoch < 3:
        for shards in loader:
            losses.append(steps.step(shards, lambda x, y: functional.cross_entropy(model(x), y)))
    seconds = (time.perf_counter() - start) / len(losses)
    assert len(losses) == 12 and sum(losses[-4:]) < sum(losses[:4]) and digest(model) != before
    return digest(model), seconds


def plain_step(kind: str) -> float:
    """The seconds of a step of the same samples with DistributedOptimizer."""
    model, x = make(kind)
    y = torch.randint(0, 5, (SAMPLES,))
    optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    own_rows = slice(32 * hvd.rank() // hvd.size(), 32 * (hvd.rank() + 1) // hvd.size())
    start = time.perf_counter()
    for _ in range(12):
        optimizer.zero_grad()
        functional.cross_entropy(model(x[own_rows]), y[own_rows]).backward()
        optimizer.step()
    return (time.perf_counter() - start) / 12


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    digests, cost = {}, {}
    for kind in ("mlp", "cnn", "transformer"):
        digests[kind], seconds = train(kind)
        model, _ = make(kind)
        steps = hvd.elastic.VirtualSteps(model, torch.optim.SGD(model.parameters(), lr=1.0), VIRTUAL)
        cost[kind] = f"{1e3 * seconds:.1f} ms per step, plain {1e3 * plain_step(kind):.1f} ms; {steps.describe_cost()}"
    print(json.dumps({"digests": digests, "cost": cost}), flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
    sys.exit(0)
