"""Every sample once per epoch, while ranks join and leave: orders, ElasticSampler, ElasticDataLoader, random histories.
The ranks are objects of this process with a stand-in for their world; real ones are in tests/frameworks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger import Counts, Ledger

pytest.importorskip("torch")
from farandole.elastic.sampler import mixed_seed, order, share_of_rank, shares
from farandole.torch.elastic import ElasticDataLoader, ElasticSampler
from farandole.torch.elastic import loader as real_loader
from farandole.torch.elastic import sampler as real_sampler

loader_module: Any = real_loader  # whose imports are replaced
sampler_module: Any = real_sampler
EPOCHS = 2


@pytest.fixture(scope="module")
def world() -> Iterator[Any]:
    engine = SimpleNamespace(rank=0, size=1)

    class World:
        """What the sampler and the loader ask of the runtime; tests change the engine's numbers."""

        world = SimpleNamespace(engine=engine)
        config = SimpleNamespace(virtual_size=0)
        rank = property(lambda self: engine.rank)
        size = property(lambda self: engine.size)

    before = loader_module.runtime
    loader_module.runtime = sampler_module.runtime = World()
    yield engine
    loader_module.runtime = sampler_module.runtime = before


@dataclass
class Change:
    after: int  # steps
    size: int
    lost: bool  # back to the last commit, or on from where it is


CHANGES = st.lists(st.builds(Change, st.integers(0, 6), st.integers(1, 5), st.booleans()), max_size=8)


@dataclass
class Job:
    """Ranks that take steps together; a commit after every few of them."""

    world: Any
    length: int
    batch: int
    interval: int
    size: int
    sources: list[Any] = field(default_factory=list)
    ledger: Ledger = field(default_factory=lambda: Ledger(0, 0))
    committed: Any = None
    at: dict[str, int] = field(default_factory=dict)

    def as_rank(self, rank: int) -> None:
        self.world.rank, self.world.size = rank, self.size

    def run(self, changes: list[Change]) -> Counts:
        self.ledger = Ledger(self.length, EPOCHS)
        self.meet()
        self.commit()
        steps = since = 0
        changes = list(changes)
        while not self.over():
            if changes and since >= changes[0].after:
                change = changes.pop(0)
                since = 0
                if change.lost:
                    self.ledger, self.at = self.committed[0].copy(), dict(self.committed[1])
                self.size = change.size
                self.meet()
                continue
            self.step()
            steps, since = steps + 1, since + 1
            if steps % self.interval == 0:
                self.commit()
        return self.ledger.count()

    def commit(self) -> None:
        self.committed = self.ledger.copy(), dict(self.at)

    def over(self) -> bool:
        return self.at["epoch"] >= EPOCHS

    def meet(self) -> None:
        raise NotImplementedError

    def step(self) -> None:
        raise NotImplementedError


class WithLoader(Job):
    virtual = 0

    def meet(self) -> None:
        self.sources = []
        for rank in range(self.size):
            self.as_rank(rank)
            one = ElasticDataLoader(range(self.length), self.batch, seed=3, virtual_size=self.virtual)
            if self.at:
                one.load_state_dict(self.at)
            self.sources.append((one, iter(one)))
        self.at = self.sources[0][0].state_dict()

    def step(self) -> None:
        weights, places, epoch = [], set(), self.at["epoch"]
        for rank, (one, batches) in enumerate(self.sources):
            self.as_rank(rank)
            if next(batches, None) is not None:
                self.ledger.record(epoch, one.indices)
                weights.append(one.weight)
            else:
                self.sources[rank] = (one, iter(one))
            places.add(tuple(one.state_dict().items()))
        assert len(places) == 1, places  # the ranks agree where they are
        assert not weights or abs(sum(weights) - self.size) < 1e-9 or self.virtual
        self.at = dict(places.pop())


class WithShards(WithLoader):
    virtual = 4


class WithSampler(Job):
    def meet(self) -> None:
        self.sources = []
        for rank in range(self.size):
            self.as_rank(rank)
            one = ElasticSampler(range(self.length), seed=3)
            one.load_state_dict(self.at or one.state_dict())
            self.sources.append((one, list(one)))
        self.at = self.sources[0][0].state_dict()
        self.done = 0

    def step(self) -> None:
        counts = set()
        for one, indices in self.sources:
            places = range(self.done, min(self.done + self.batch, len(indices)))
            counts.add(len(places))
            self.ledger.record(
                self.at["epoch"],
                [indices[index] for index in places if index not in one.padded],
                [indices[index] for index in places if index in one.padded],
            )
        assert len(counts) == 1  # all ranks have equally many
        count = counts.pop()
        self.done += count
        for rank, (one, _) in enumerate(self.sources):
            self.as_rank(rank)
            if count:
                one.record_batch(0, count)
            else:
                one.set_epoch(one.epoch + 1)
                self.done = 0
        self.sources = [(one, indices if count else list(one)) for one, indices in self.sources]
        self.at = self.sources[0][0].state_dict()


@settings(max_examples=150, deadline=None)
@given(changes=CHANGES, length=st.integers(0, 50), batch=st.integers(1, 5), interval=st.integers(1, 4))
@pytest.mark.parametrize("kind", [WithLoader, WithShards])
def test_row_25_the_loader_is_exact(
    world: Any, kind: Any, changes: list[Change], length: int, batch: int, interval: int
) -> None:
    assert kind(world, length, batch, interval, 3).run(changes) == Counts(0, 0, 0)


@settings(max_examples=150, deadline=None)
@given(changes=CHANGES, length=st.integers(0, 50), batch=st.integers(1, 5), interval=st.integers(1, 4))
def test_row_25_the_sampler_repeats_only_what_it_marks(
    world: Any, changes: list[Change], length: int, batch: int, interval: int
) -> None:
    found = WithSampler(world, length, batch, interval, 3).run(changes)
    assert found.lost == 0 and found.duplicated == 0
    assert found.padded < max([3, *(change.size for change in changes)])


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    one = order(1000, 7, 3)
    assert sorted(one) == list(range(1000)) and (one == order(1000, 7, 3)).all()
    for other in (order(1000, 8, 3), order(1000, 7, 4)):
        assert (one != other).mean() > 0.9
    assert order(5, 7, 3, shuffle=False).tolist() == [0, 1, 2, 3, 4]


def test_the_order_is_the_same_in_every_version() -> None:
    # A cursor in a checkpoint of today has to mean the same in every later version.
    assert order(10, 0, 0).tolist() == [2, 3, 0, 8, 4, 9, 6, 1, 5, 7]
    assert mixed_seed(1, 2, 3) == 3851293329796251419


def test_horovods_order_and_padding(world: Any) -> None:
    world.rank, world.size = 1, 4
    sampler = ElasticSampler(range(10), seed=5)
    sampler.set_epoch(2)
    expected = list(range(10))
    random.Random(7).shuffle(expected)
    assert list(sampler) == (expected + expected[:2])[1:12:4]
    assert len(sampler) == 3 and sampler.padded == frozenset()
    world.rank = 3
    sampler.reset()
    assert list(sampler)[-1] == expected[1] and sampler.padded == {2}
    sampler.record_batch(0, 2)
    assert sampler.state_dict() == {"epoch": 2, "processed_num": 8}
    world.rank, world.size = 2, 3
    sampler.reset()
    assert list(sampler) == [expected[8]] and sampler.padded == {0} and sampler.remaining_indices == expected[8:]


def test_with_few_samples_no_rank_waits_forever(world: Any) -> None:
    world.size = 5
    for rank in range(5):
        world.rank = rank
        sampler = ElasticSampler([0], shuffle=False)
        assert list(sampler) == [0] and sampler.padded == (frozenset() if rank == 0 else {0})
        assert list(ElasticSampler([], shuffle=False)) == []


def test_a_rank_without_samples_takes_part_with_weight_zero(world: Any) -> None:
    world.size = 4
    for rank, (count, weight) in enumerate([(1, 2.0), (1, 2.0), (0, 0.0), (0, 0.0)]):
        world.rank = rank
        loader = ElasticDataLoader(range(10), 2, shuffle=False)
        [whole, last] = [(batch.tolist(), loader.weight, list(loader.indices)) for batch in loader]
        assert whole == ([2 * rank, 2 * rank + 1], 1.0, [2 * rank, 2 * rank + 1])
        assert len(last[0]) == 1 and last[1] == weight and len(last[2]) == count


def test_prefetched_batches_do_not_count_as_done(world: Any) -> None:
    world.rank, world.size = 0, 2
    loader = ElasticDataLoader(range(40), 2, seed=1, num_workers=2, prefetch_factor=4)
    seen = []
    for batch in loader:
        seen += batch.tolist()
        if loader.cursor == 12:
            break
    assert loader.state_dict() == {"epoch": 0, "cursor": 12} and len(seen) == 6
    world.size = 1
    loader.reset()
    rest = [int(index) for batch in loader for index in batch]
    assert sorted(rest) == sorted(order(40, 1, 0)[12:].tolist()) and loader.state_dict() == {"epoch": 1, "cursor": 0}


def test_a_loop_of_an_old_generation_raises_that_the_ranks_have_changed(world: Any) -> None:
    world.rank, world.size = 0, 2
    loader = ElasticDataLoader(range(40), 2)
    batches = iter(loader)
    next(batches)
    loader.reset()
    with pytest.raises(RuntimeError, match="ranks have changed"):
        next(batches)


def test_epochs(world: Any) -> None:
    world.rank, world.size = 0, 1
    loader = ElasticDataLoader(range(5), 2, shuffle=False)
    assert len(loader) == 3 and len(list(loader)) == 3 and loader.epoch == 1
    loader.set_epoch(1)
    next(iter(loader))
    loader.set_epoch(1)
    assert loader.cursor == 2 and len(loader) == 2
    loader.set_epoch(4)
    assert loader.cursor == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drop_last": True}, "no sample is left out"),
        ({"sampler": [1]}, "its own order"),
        ({"batch_size": 0}, "at least 1"),
        ({"virtual_size": 6}, "power of two"),
    ],
)
def test_what_the_loader_refuses(world: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ElasticDataLoader(range(5), **options)


def test_shares_and_dealt_samples_cover_all_samples() -> None:
    for count in range(20):
        for size in range(1, 6):
            assert [thing for rank in range(size) for thing in share_of_rank(count, rank, size)] == list(range(count))
            step = shares(3, 3 + count, size, 2)
            assert sum(share.count for share in step) == min(2 * size, count)
            assert np.isclose(sum(share.weight for share in step), 1.0) or not step
