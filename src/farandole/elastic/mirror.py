# State of which every rank holds its own part: committed here and on one other host, dealt out anew after a change.
# Touches objects, ops, reductions and runtime.
"""`Sharded` is what users hold; `Mirror` keeps its commits so that the loss of any one host loses none of them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from .. import ops
from ..objects import allgather_object, dumps, loads
from ..runtime import runtime

Key: TypeAlias = int | str
Item: TypeAlias = tuple[str, Key]  # the attribute of the state, and the key in it
Blobs: TypeAlias = dict[Item, bytes]


class LostShards(RuntimeError):
    """Parts of the last commit are gone: the ranks that held them and those with the copies were lost together."""


class Sharded:
    """A dictionary of which each rank holds some keys: optimizer shards, say. Keys are numbers or texts.

    When ranks come or go the keys of all ranks are dealt out anew: the i-th in order goes to rank i modulo size. Give
    every rank all keys to begin with: one that is lost before the first commit then takes none of them away. Values are
    whatever can be pickled.

    >>> moments = Sharded({0: [0.5], 1: [0.25]})
    >>> sorted(moments)
    [0, 1]
    """

    def __init__(self, values: Mapping[Any, Any] | None = None) -> None:
        self._values: dict[Key, Any] = dict(values or {})

    def __getitem__(self, key: Key) -> Any:
        return self._values[key]

    def __setitem__(self, key: Key, value: Any) -> None:
        self._values[key] = value

    def __delitem__(self, key: Key) -> None:
        del self._values[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def collect(self) -> dict[Key, Any]:
        """What a commit keeps."""
        return self._values

    def apply(self, values: dict[Key, Any]) -> None:
        """Takes what this rank holds from now on."""
        self._values = values

    def settle(self) -> None:
        """After a change of ranks, when every rank has taken its values; a collective call."""


class RandomState(Sharded):
    """The generators of Python's `random` and of NumPy, one pair for each rank number.

    A rank number that goes keeps its place in the stream until there is such a rank again.
    """

    def collect(self) -> dict[Key, Any]:
        """The generators as they stand now, and those kept for ranks that are not there."""
        self._values[runtime.world.engine.rank] = self.capture()
        return self._values

    def apply(self, values: dict[Key, Any]) -> None:
        """Sets this rank's generators; a rank that is new keeps its own."""
        super().apply(values)
        own = values.get(runtime.world.engine.rank)
        if own is not None:
            self.set(own)

    def capture(self) -> Any:
        """The generators' states."""
        return random.getstate(), np.random.get_state()

    def set(self, value: Any) -> None:
        """Sets the generators to what `capture` gave."""
        random.setstate(value[0])
        np.random.set_state(value[1])


def partner(rank: int, hosts: Sequence[int]) -> int | None:
    """Who keeps a rank's copy: one on the next host, or the next rank where there is one host; None when alone.

    >>> [partner(rank, [0, 0, 1, 1]) for rank in range(4)]
    [2, 3, 0, 1]
    """
    members: dict[int, list[int]] = {}
    for number, host in enumerate(hosts):
        members.setdefault(host, []).append(number)
    order = list(members)
    here = members[hosts[rank]]
    place = here.index(rank)
    if len(order) == 1:
        return here[(place + 1) % len(here)] if len(here) > 1 else None
    there = members[order[(order.index(hosts[rank]) + 1) % len(order)]]
    return there[place % len(there)]


def owners(items: Iterable[Item], size: int) -> dict[Item, int]:
    """Which rank gets what."""
    named: dict[str, list[Item]] = {}
    for item in items:
        named.setdefault(item[0], []).append(item)
    return {
        item: place % size
        for group in named.values()
        for place, item in enumerate(sorted(group, key=lambda item: (isinstance(item[1], str), item[1])))
    }


@dataclass
class Holding:
    """What a rank has of one commit: its own part, copies for others, and the list of what all ranks have."""

    own: Blobs = field(default_factory=dict)
    copies: Blobs = field(default_factory=dict)
    everything: list[Item] = field(default_factory=list)

    def bytes(self) -> int:
        return sum(len(blob) for blobs in (self.own, self.copies) for blob in blobs.values())


def exchange(parcels: dict[int, Any], name: str) -> list[Any]:
    """Sends each rank its parcel and gives those that came."""
    size = runtime.world.engine.size
    packed = [dumps(parcels[rank]) if rank in parcels else b"" for rank in range(size)]
    data = np.frombuffer(b"".join(packed), dtype=np.uint8)
    received, lengths = ops.alltoall(data, np.array([len(one) for one in packed], dtype=np.int64), name)
    ends = np.cumsum(lengths)
    return [
        loads(received[end - length : end].tobytes()) for end, length in zip(ends, lengths, strict=True) if length > 0
    ]


class Mirror:
    """The commits of all sharded parts of one state, on this rank.

    A commit is first made everywhere (`prepare`), then agreed on (`agree`): while the ranks may disagree whether it
    counts, the one before it is kept as well.
    """

    def __init__(self, parts: dict[str, Sharded]) -> None:
        self.parts = parts
        self.agreed = 0  # the newest commit that is known to be complete on all ranks
        self.held: dict[int, Holding] = {}
        self._staged: Holding | None = None  # the agreed commit, dealt out anew; not yet known to be so everywhere

    def begin(self) -> None:
        """The first commit, of what the ranks were given, dealt out; a collective call."""
        self.prepare(1)
        self.agree(1)
        self.recover()

    def prepare(self, number: int) -> None:
        """Makes commit `number` here and on this rank's partner; a collective call."""
        own = {(name, key): dumps(value) for name, part in self.parts.items() for key, value in part.collect().items()}
        self.held[number] = Holding(own, self._copied(own))

    def agree(self, number: int) -> None:
        """Returns when all ranks have prepared the commit; from then on it is the one that counts."""
        new, old = self.held[number], self.held.get(self.agreed, Holding())
        changed = np.array([self.agreed == 0 or new.own.keys() != old.own.keys()], dtype=np.int32)
        if ops.allreduce(changed, op=ops.Max, name="elastic.agree")[0]:
            everyones = allgather_object(list(new.own), name="elastic.items")
            new.everything = list(dict.fromkeys(item for items in everyones for item in items))
            ops.barrier()  # who knows what there is may be the only one left to tell
        else:
            new.everything = old.everything
        self._settle(number, new)

    def _settle(self, number: int, holding: Holding) -> None:
        self.agreed, self.held, self._staged = number, {number: holding}, None

    def _copied(self, own: Blobs) -> Blobs:
        world = runtime.world
        keeper = partner(world.engine.rank, world.session.hosts)
        parcels = {} if keeper is None else {keeper: own}
        return {item: blob for copies in exchange(parcels, "elastic.mirror") for item, blob in copies.items()}

    def restore(self) -> None:
        """Goes back to the agreed commit, as far as this rank holds it."""
        if self.agreed:
            self._apply(self.held[self.agreed].own)

    def recover(self) -> None:
        """After a change of ranks: all parts of the newest agreed commit, dealt out anew; a collective call."""
        told = allgather_object((self.agreed, self._everything(), self._inventory()), name="elastic.recover")
        newest = max(agreed for agreed, _, _ in told)
        if newest == 0:
            return  # nothing has been committed yet: every rank begins with what it has
        everything = next(items for agreed, items, _ in told if agreed == newest)
        sources = _sources(everything, newest, [inventory for _, _, inventory in told])
        holdings = self._holdings(newest)
        own = self._move(owners(everything, runtime.world.engine.size), sources, holdings)
        staged = Holding(own, self._copied(own), everything)
        # All ways to hold this commit are kept until every rank has the new one: somebody may be lost right now, and
        # it need not be the first time.
        before = Holding(everything=everything)
        for holding in holdings:
            before.own |= holding.own
            before.copies |= holding.copies
        self.held, self.agreed, self._staged = {newest: before}, newest, staged
        ops.barrier()
        self._settle(newest, staged)
        self._apply(own)
        for part in self.parts.values():
            part.settle()

    def _everything(self) -> list[Item]:
        return self.held[self.agreed].everything if self.agreed else []

    def _holdings(self, number: int) -> list[Holding]:
        staged = self._staged if number == self.agreed else None
        return [one for one in (self.held.get(number), staged) if one is not None]

    def _inventory(self) -> dict[int, tuple[list[Item], list[Item]]]:
        """For each commit: what this rank has as its own, and what it has copies of."""
        return {
            number: (
                [item for one in self._holdings(number) for item in one.own],
                [item for one in self._holdings(number) for item in one.copies],
            )
            for number in self.held
        }

    def _move(self, targets: dict[Item, int], sources: dict[Item, int], holdings: list[Holding]) -> Blobs:
        rank = runtime.world.engine.rank
        here: Blobs = {}
        for holding in reversed(holdings):
            here |= {**holding.copies, **holding.own}
        parcels: dict[int, Blobs] = {}
        for item, target in targets.items():
            if sources[item] == rank:
                parcels.setdefault(target, {})[item] = here[item]
        return {item: blob for blobs in exchange(parcels, "elastic.move") for item, blob in blobs.items()}

    def _apply(self, own: Blobs) -> None:
        for name, part in self.parts.items():
            part.apply({key: loads(blob) for (owner, key), blob in own.items() if owner == name})

    def values(self) -> dict[str, dict[Key, Any]]:
        """This rank's own parts of the agreed commit."""
        parts: dict[str, dict[Key, Any]] = {name: {} for name in self.parts}
        for (name, key), blob in (self.held[self.agreed].own if self.agreed else {}).items():
            parts[name][key] = loads(blob)
        return parts

    def adopt(self, number: int, values: dict[str, dict[Key, Any]]) -> None:
        """All parts of a commit that was read from disk; `recover` deals them out."""
        own = {(name, key): dumps(value) for name, part in values.items() for key, value in part.items()}
        self._settle(number, Holding(own, {}, list(own)))
        self._apply(own)

    def bytes(self) -> int:
        """The memory that commits of sharded parts take here."""
        return sum(holding.bytes() for holding in self.held.values())


def _sources(known: Iterable[Item], number: int, told: Sequence[dict[int, tuple[list[Item], ...]]]) -> dict[Item, int]:
    """Who gives each item: who has it as its own part, else who has the copy; LostShards when nobody does."""
    found: dict[Item, int] = {}
    for kind in (1, 0):
        for rank in reversed(range(len(told))):
            for item in told[rank].get(number, ([], []))[kind]:
                found[item] = rank
    lost = [item for item in known if item not in found]
    if lost:
        names = ", ".join(f"{name}[{key!r}]" for name, key in lost[:10])
        raise LostShards(
            f"{len(lost)} sharded parts of commit {number} are lost ({names}): the ranks that held them and those with "
            "their copies went together; start again from a checkpoint (state.load_from)"
        )
    return found
