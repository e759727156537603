# The program of the fault tests: trains with a sampler, a loader or virtual shards, and keeps a ledger as well.
# Touches farandole.torch as users see it, and files in a scratch directory.
"""The ledger is part of the committed state: which samples of which epoch stand behind the model, and how often.

A file named `finish` ends the training after the current epoch.
"""

from __future__ import annotations

import hashlib
import os
import sys
from typing import Any

import torch
from elastic_files import SCRATCH, agreed, begin, check_waiting, finishing, leave
from elastic_files import tell as tell_step
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import farandole.torch as hvd
from farandole.elastic import commits

MODE, SAMPLES, EPOCHS, WORKERS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
COMMIT_EVERY = 3
SHARDS = 8


class Numbered(torch.utils.data.Dataset[Any]):
    """Samples that know their number."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(1)
        self.data = TensorDataset(torch.arange(SAMPLES), torch.randn(SAMPLES, 6, generator=draw))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


def note(state: Any, epoch: int, used: list[int], padded: list[int]) -> None:
    """Adds this step's samples, of all ranks, to the ledger."""
    counts = torch.zeros(2, SAMPLES, dtype=torch.int64)
    for row, indices in enumerate((used, padded)):
        for index in indices:
            counts[row, index] += 1
    counts = hvd.allreduce(counts, op=hvd.Sum, name="ledger")
    row = state.ledger.setdefault(epoch, torch.zeros(2, SAMPLES, dtype=torch.int64))
    row += counts
    state.step += 1
    state.sizes.append(hvd.size())


def tell(state: Any, epoch: int) -> None:
    tell_step(state.step, epoch=epoch, commits=commits(state))


def over(epoch: int, done: int) -> bool:
    """Whether the epoch that begins is not needed any more; all ranks agree."""
    if done or epoch < EPOCHS:
        return False
    if EPOCHS:
        return True
    return agreed(finishing())


def with_sampler(state: Any, model: nn.Module, optimizer: Any) -> None:
    sampler = state.sampler
    loader = DataLoader(Numbered(), 4, sampler=sampler, num_workers=WORKERS)
    while not over(sampler.epoch, sampler.processed_num):
        taken = 0
        for batch, (numbers, x) in enumerate(loader):
            learn(model, optimizer, x, 1.0)
            places = range(taken, taken + len(numbers))
            taken += len(numbers)
            local = [sampler.indices[index] for index in places]
            assert local == numbers.tolist()
            padded = [sampler.indices[index] for index in places if index in sampler.padded]
            used = [sampler.indices[index] for index in places if index not in sampler.padded]
            note(state, sampler.epoch, used, padded)
            sampler.record_batch(batch, len(numbers))
            tell(state, sampler.epoch)
            if batch % COMMIT_EVERY == 0:
                state.commit()
        sampler.set_epoch(sampler.epoch + 1)
        state.commit()


def with_loader(state: Any, model: nn.Module, optimizer: Any) -> None:
    loader = state.loader
    while not over(loader.epoch, loader.cursor):
        for numbers, x in loader:
            if state.step % COMMIT_EVERY == 0:
                state.commit()  # before this batch is used, as many scripts do
            assert not loader.indices or loader.indices == numbers.tolist()
            learn(model, optimizer, x, loader.weight)
            note(state, loader.epoch, loader.indices, [])
            tell(state, loader.epoch)


def with_shards(state: Any, model: nn.Module, optimizer: Any) -> None:
    steps = hvd.elastic.VirtualSteps(model, optimizer, SHARDS)
    while not over(state.loader.epoch, state.loader.cursor):
        for shards in state.loader:
            steps.step(shards, lambda numbers, x: mse_loss(model(x), torch.sin(3 * x[:, :2])))
            note(state, state.loader.epoch, state.loader.indices, [])
            tell(state, state.loader.epoch)
            if state.step % COMMIT_EVERY == 0:
                state.commit()


def learn(model: nn.Module, optimizer: Any, x: torch.Tensor, weight: float) -> None:
    optimizer.zero_grad()
    (mse_loss(model(x), torch.sin(3 * x[:, :2])) * weight).backward()
    optimizer.step()


def made(kind: str) -> nn.Module:
    """From six numbers to two."""
    if kind == "cnn":
        return nn.Sequential(
            nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 8, 3), nn.Tanh(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(32, 2)
        )
    if kind == "transformer":
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        words = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        return nn.Sequential(nn.Unflatten(1, (6, 1)), nn.Linear(1, 16), words, nn.Flatten(), nn.Linear(96, 2))
    return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Dropout(0.1), nn.Linear(24, 2))


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(1)
    model = made(os.environ.get("MODEL", "mlp"))
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
    source: dict[str, Any] = {}
    if MODE == "sampler":
        source["sampler"] = hvd.elastic.ElasticSampler(range(SAMPLES), seed=3)
    else:
        shards = SHARDS if MODE == "shards" else 0
        source["loader"] = hvd.elastic.ElasticDataLoader(
            Numbered(), 2 if shards else 4, seed=3, virtual_size=shards, num_workers=WORKERS
        )
    if MODE != "shards":
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, ledger={}, step=0, sizes=[], **source)
    if os.environ.get("SAVES"):
        state.register_save_callback(lambda: open(SCRATCH / f"saved.{os.getpid()}.{state.step}", "x").close())
    way = {"sampler": with_sampler, "loader": with_loader, "shards": with_shards}[MODE]

    check_waiting()

    @hvd.elastic.run
    def train(state: Any) -> None:
        begin()
        tell(state, -1)
        way(state, model, optimizer)

    train(state)
    hvd.check_equal(model)
    weights = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
    leave(
        weights=hashlib.sha256(weights).hexdigest(),
        used=[state.ledger[epoch][0].tolist() for epoch in sorted(state.ledger)],
        padded=[state.ledger[epoch][1].tolist() for epoch in sorted(state.ledger)],
        sizes=state.sizes,
        commits=commits(state),
    )


if __name__ == "__main__":
    main()
