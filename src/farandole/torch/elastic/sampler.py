# ElasticSampler: divides an epoch's samples among the current ranks, and remembers how many are done.
# Touches torch; the rooms elastic and world.
"""Like Horovod's sampler, with padding: all ranks have the same number of samples. It marks the repeated ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...elastic.sampler import horovod_order
from ...world.runtime import runtime

__all__ = ["ElasticSampler"]


class ElasticSampler(torch.utils.data.Sampler):  # type: ignore[misc, type-arg, unused-ignore]
    """Samples for this rank; after a change of ranks, the remaining samples are divided again.

    Put it into the state, call `record_batch` after each batch and `set_epoch` at the end of each epoch. Up to size - 1
    samples are repeated at the end of an epoch, so that all ranks have the same number: `padded` has their positions in
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
        """Begins an epoch, of which nothing is done yet."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """All ranks have done a batch with this many samples each."""
        del batch_idx
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many of its samples are done."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continues from this state with the current ranks."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divides the remaining samples among the current ranks."""
        self.num_replicas, self.rank = runtime.size, runtime.rank
        order = horovod_order(len(self.dataset), self.seed, self.epoch, self.shuffle)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        positions = range(self.rank, self.total_size, self.num_replicas)
        # If very few samples remain, some are used more than twice, so that each rank has one.
        self.indices = [left[position % len(left)] for position in positions]
        self.padded = frozenset(number for number, position in enumerate(positions) if position >= len(left))
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
