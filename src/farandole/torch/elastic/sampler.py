# ElasticSampler: deals an epoch's samples out to the ranks that are there, and remembers how many are done.
# Touches torch, elastic/sampler and runtime.
"""Horovod's sampler, with its padding: all ranks have equally many samples. Which ones are repeated is marked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...elastic.sampler import horovod_order
from ...runtime import runtime

__all__ = ["ElasticSampler"]


class ElasticSampler(torch.utils.data.Sampler):  # type: ignore[misc, type-arg, unused-ignore]
    """Samples for this rank; after a change of ranks those that are left are dealt out anew.

    Put it into the state, call `record_batch` after each batch and `set_epoch` at the end of each epoch. So that all
    ranks have equally many, up to size - 1 samples come twice at the end of an epoch: `padded` has their places in
    `indices`. ElasticDataLoader repeats none.
    """

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.num_replicas = 0
        self.rank = 0
        self.remaining_indices: list[int] = []
        self.num_samples = 0
        self.total_size = 0
        self.indices: list[int] = []
        self.padded: frozenset[int] = frozenset()
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch: nothing of it is done yet."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """All ranks have done a batch of so many samples each."""
        del batch_idx
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """How far the epoch has come."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Goes on from there, with the ranks that are there now."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deals what is left out to the ranks that are there now."""
        engine = runtime.world.engine
        self.num_replicas, self.rank = engine.size, engine.rank
        order = horovod_order(len(self.dataset), self.seed, self.epoch, self.shuffle)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        places = range(self.rank, self.total_size, self.num_replicas)
        # Of very few samples some come more than twice, so that no rank is left waiting.
        self.indices = [left[place % len(left)] for place in places]
        self.padded = frozenset(number for number, place in enumerate(places) if place >= len(left))
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
