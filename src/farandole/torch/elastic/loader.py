# ElasticDataLoader: gives every sample of an epoch exactly once, without padding, also when ranks join or leave.
# Touches torch; the rooms elastic and world.
"""The only state is the epoch and a cursor in its order of samples. The cursor does not move when torch fetches a batch
in advance."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from ...elastic.sampler import Share, mixed_seed, next_cursor, order, share_of_rank, shares
from ...elastic.virtual import checked_size
from ...world.runtime import runtime

__all__ = ["ElasticDataLoader", "Shard"]

_REFUSED = {
    "sampler": "the loader has its own order",
    "batch_sampler": "the loader has its own order",
    "drop_last": "no sample is left out",
    "persistent_workers": "workers end when ranks come or go",
}


@dataclass(frozen=True)
class Shard:
    """One of the virtual_size parts of a step."""

    number: int
    weight: float  # its share of the step's samples
    seed: int  # computed from the loader's seed, the position in the epoch and the shard's number
    indices: list[int]
    data: Any


class _BatchIndices:
    """The sample indices of each batch of this rank, in order. They are computed when torch asks for them."""

    def __init__(self, loader: ElasticDataLoader) -> None:
        self.steps = loader.plan()

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.steps:
            for _, indices, _ in step:
                yield indices


class _Pass:
    """One pass over the rest of an epoch. It is closed when ranks join or leave."""

    def __init__(self, loader: ElasticDataLoader) -> None:
        self.size = runtime.world.engine.size
        self.batches: Any = iter(loader.make_loader())

    def next(self) -> Any:
        if self.batches is None:
            raise RuntimeError("the ranks have changed since this loop began; begin a new one over the loader")
        return next(self.batches)

    def close(self) -> None:
        self.batches = None  # this was the last reference: torch now ends the processes that fetch batches


class ElasticDataLoader:
    """Batches of a map-style dataset for this rank. Put the loader into the elastic state, with the optimizer.

    `batch_size` is for one rank. In the last step of an epoch the ranks may get batches of different sizes. So multiply
    the mean loss of each batch by `weight` (with op=Average). `indices` has the numbers of the batch's samples. A rank
    for which no sample is left gets any sample, with weight 0 and empty `indices`. An interrupted epoch continues where
    it stopped. When an epoch ends, `epoch` increases by one.

    `virtual_size` is a power of two, or 0; if it is None, the setting `virtual_size` is used. If it is not 0, a step is
    a list of this rank's Shards for VirtualSteps, and `batch_size` is for one shard. Torch's DataLoader gets `options`.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        virtual_size: int | None = None,
        **options: Any,
    ) -> None:
        for name, reason in _REFUSED.items():
            if options.get(name):
                raise ValueError(f"ElasticDataLoader takes no {name}: {reason}")
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: expected at least 1")
        if virtual_size is None:
            virtual_size = runtime.config.virtual_size
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.virtual_size = checked_size(virtual_size) if virtual_size else 0
        self.epoch = 0
        self.cursor = 0
        self.weight = 1.0
        self.indices: list[int] = []
        self._options = {name: value for name, value in options.items() if name not in _REFUSED}
        self._pass: _Pass | None = None
        self._at_last_step: tuple[int, int] | None = None  # (epoch, cursor); None until `follow_steps`

    # --- the position ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many of its samples are done.

        If the elastic state also has an optimizer, a batch is done when the optimizer has stepped. Otherwise it is done
        when the loader has given it.
        """
        epoch, cursor = (self.epoch, self.cursor) if self._at_last_step is None else self._at_last_step
        return {"epoch": epoch, "cursor": cursor}

    def follow_steps(self) -> None:
        """Tells the loader that from now on a batch is done when `stepped` is called."""
        self._at_last_step = self.epoch, self.cursor

    def stepped(self) -> None:
        """Tells the loader that an optimizer has stepped: all batches given so far are done."""
        if self._at_last_step is not None:
            self._at_last_step = self.epoch, self.cursor

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Goes to the epoch and cursor of `state_dict`, and divides the remaining samples among the current ranks."""
        self.reset()
        self._go_to(state_dict["epoch"], state_dict["cursor"])

    def _go_to(self, epoch: int, cursor: int) -> None:
        self.epoch, self.cursor = epoch, cursor
        self.stepped()

    def set_epoch(self, epoch: int) -> None:
        """Goes to the beginning of an epoch, unless the loader is already in this epoch."""
        if epoch != self.epoch:
            self.reset()
            self._go_to(epoch, 0)

    def reset(self) -> None:
        """Ends the current pass, and goes back to the position after the last batch that is done."""
        if self._pass is not None:
            self._pass.close()
            self._pass = None
        if self._at_last_step is not None:
            self.epoch, self.cursor = self._at_last_step

    @property
    def parts(self) -> int:
        """The number of parts of a step."""
        return self.virtual_size or runtime.size

    def __len__(self) -> int:
        """The number of steps that are left in this epoch, with the current ranks."""
        return math.ceil((len(self.dataset) - self.cursor) / (self.parts * self.batch_size))

    # --- the batches -------------------------------------------------------------------------------------------------

    def plan(self) -> Iterator[list[tuple[int, list[int], Share]]]:
        """For each remaining step: the number, samples and share of each part that this rank fetches."""
        length, cursor, parts, size = len(self.dataset), self.cursor, self.parts, self.batch_size
        world = runtime.world.engine
        own_parts = (
            share_of_rank(parts, world.rank, world.size) if self.virtual_size else range(world.rank, world.rank + 1)
        )
        samples = order(length, self.seed, self.epoch, self.shuffle)
        while step := shares(cursor, length, parts, size):
            fetched = []
            for number in own_parts:
                share = step[number]
                if share.count:
                    fetched.append((number, samples[share.start : share.start + share.count].tolist(), share))
                elif not self.virtual_size:  # every rank must take part: it gets any sample, with weight 0
                    fetched.append((number, samples[cursor : cursor + 1].tolist(), share))
            yield fetched
            cursor = next_cursor(cursor, length, parts, size)

    def make_loader(self) -> Any:
        """Makes torch's loader for the batches of this rank."""
        options = dict(self._options)
        if "generator" not in options:
            # Without this generator, torch's loader would use the generator that dropout uses.
            options["generator"] = torch.Generator().manual_seed(mixed_seed(self.seed, self.epoch, self.cursor))
        return DataLoader(self.dataset, batch_sampler=_BatchIndices(self), **options)

    def __iter__(self) -> Iterator[Any]:
        self.reset()
        current = self._pass = _Pass(self)
        try:
            for step in self.plan():
                data = [current.next() for _ in step]
                cursor = self.cursor
                self.cursor = next_cursor(cursor, len(self.dataset), self.parts, self.batch_size)
                if self.virtual_size:
                    yield self._shards(cursor, step, data)
                    continue
                [(_, indices, share)] = step
                self.indices = indices if share.count else []
                self.weight = share.weight * current.size
                yield data[0]
            if self._pass is current:
                self._go_to(self.epoch + 1, 0)
        finally:
            current.close()

    def _shards(self, cursor: int, step: list[tuple[int, list[int], Share]], data: list[Any]) -> list[Shard]:
        self.indices = [index for _, indices, _ in step for index in indices]
        return [
            Shard(number, share.weight, mixed_seed(self.seed, self.epoch, cursor, number), indices, content)
            for (number, indices, share), content in zip(step, data, strict=True)
        ]
