# Sharded state: each rank holds a part, another host has a copy, and a change of ranks distributes all parts again.
# Touches the rooms operations and world.
"""Users have `Sharded` objects. `Mirror` keeps their commits, so that no commit is lost when one host is lost."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from ..operations import ops
from ..operations.objects import allgather_object, dumps, loads
from ..world.runtime import runtime

Key: TypeAlias = int | str
Item: TypeAlias = tuple[str, Key]  # the attribute of the state, and the key in it
Blobs: TypeAlias = dict[Item, bytes]


class LostShards(RuntimeError):
    """Parts of the last commit are lost: the ranks that held them and the ranks with the copies failed together."""


class Sharded:
    """A dictionary of which each rank holds some keys, for example optimizer shards. Keys are numbers or strings.

    When ranks join or leave, the keys of all ranks are distributed again: key i in order goes to rank i modulo size. At
    the start give every rank all keys, so that no key is lost if a rank is lost before the first commit. Values must
    be picklable.

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
        """The values that a commit keeps."""
        return self._values

    def apply(self, values: dict[Key, Any]) -> None:
        """Replaces the values of this rank."""
        self._values = values

    def settle(self) -> None:
        """Called after a change of ranks, when every rank has its new values. All ranks call it together."""


class RandomState(Sharded):
    """The generators of Python's `random` and of NumPy, one pair for each rank number.

    If a rank number disappears, its generators are kept until a rank has this number again.
    """

    def collect(self) -> dict[Key, Any]:
        """The present generators of this rank, and those that are kept for rank numbers that do not exist now."""
        self._values[runtime.world.engine.rank] = self.capture()
        return self._values

    def apply(self, values: dict[Key, Any]) -> None:
        """Sets this rank's generators. A rank number that is new keeps its own generators."""
        super().apply(values)
        own_values = values.get(runtime.world.engine.rank)
        if own_values is not None:
            self.set(own_values)

    def capture(self) -> Any:
        """The state of the generators."""
        return random.getstate(), np.random.get_state()

    def set(self, value: Any) -> None:
        """Sets the generators to a state from `capture`."""
        random.setstate(value[0])
        np.random.set_state(value[1])


def partner(rank: int, hosts: Sequence[int]) -> int | None:
    """The rank that keeps the copy of `rank`: on the next host, or the next rank of a single host; None if alone.

    >>> [partner(rank, [0, 0, 1, 1]) for rank in range(4)]
    [2, 3, 0, 1]
    """
    members: dict[int, list[int]] = {}
    for number, host in enumerate(hosts):
        members.setdefault(host, []).append(number)
    order = list(members)
    here = members[hosts[rank]]
    index = here.index(rank)
    if len(order) == 1:
        return here[(index + 1) % len(here)] if len(here) > 1 else None
    there = members[order[(order.index(hosts[rank]) + 1) % len(order)]]
    return there[index % len(there)]


def owners(items: Iterable[Item], size: int) -> dict[Item, int]:
    """Which rank gets each item."""
    named: dict[str, list[Item]] = {}
    for item in items:
        named.setdefault(item[0], []).append(item)
    return {
        item: index % size
        for group in named.values()
        for index, item in enumerate(sorted(group, key=lambda item: (isinstance(item[1], str), item[1])))
    }


@dataclass
class Holding:
    """What a rank has of one commit: its own part, copies of other parts, and the list of the items of all ranks."""

    own_values: Blobs = field(default_factory=dict)
    copies: Blobs = field(default_factory=dict)
    everything: list[Item] = field(default_factory=list)

    def bytes(self) -> int:
        return sum(len(blob) for blobs in (self.own_values, self.copies) for blob in blobs.values())


def exchange(payloads: dict[int, Any], name: str) -> list[Any]:
    """Sends each rank its object and returns the objects that this rank received."""
    size = runtime.world.engine.size
    packed = [dumps(payloads[rank]) if rank in payloads else b"" for rank in range(size)]
    data = np.frombuffer(b"".join(packed), dtype=np.uint8)
    received, lengths = ops.alltoall(data, np.array([len(one) for one in packed], dtype=np.int64), name)
    ends = np.cumsum(lengths)
    return [
        loads(received[end - length : end].tobytes()) for end, length in zip(ends, lengths, strict=True) if length > 0
    ]


class Mirror:
    """The commits of all sharded parts of one state, on this rank.

    First all ranks make a commit (`prepare`), then they agree on it (`agree`). Until then the commit before it is kept
    too, because ranks may not agree on the new one.
    """

    def __init__(self, parts: dict[str, Sharded]) -> None:
        self.parts = parts
        self.agreed = 0  # the newest commit that this rank knows to be complete on all ranks
        self.held: dict[int, Holding] = {}
        self._staged: Holding | None = None  # the agreed commit, distributed again, until all ranks have it

    def begin(self) -> None:
        """Commits the initial values and distributes them. All ranks call it together."""
        self.prepare(1)
        self.agree(1)
        self.recover()

    def prepare(self, number: int) -> None:
        """Makes commit `number` here and on this rank's partner. All ranks call it together."""
        own_values = {
            (name, key): dumps(value) for name, part in self.parts.items() for key, value in part.collect().items()
        }
        self.held[number] = Holding(own_values, self._copied(own_values))

    def agree(self, number: int) -> None:
        """Waits until all ranks have prepared the commit. From then on it is the agreed commit."""
        new, old = self.held[number], self.held.get(self.agreed, Holding())
        changed = np.array([self.agreed == 0 or new.own_values.keys() != old.own_values.keys()], dtype=np.int32)
        if ops.allreduce(changed, op=ops.Max, name="elastic.agree")[0]:
            everyones = allgather_object(list(new.own_values), name="elastic.items")
            new.everything = list(dict.fromkeys(item for items in everyones for item in items))
            ops.barrier()  # no rank continues before all ranks have the list
        else:
            new.everything = old.everything
        self._settle(number, new)

    def _settle(self, number: int, holding: Holding) -> None:
        self.agreed, self.held, self._staged = number, {number: holding}, None

    def _copied(self, own_values: Blobs) -> Blobs:
        world = runtime.world
        keeper = partner(world.engine.rank, world.session.hosts)
        payloads = {} if keeper is None else {keeper: own_values}
        return {item: blob for copies in exchange(payloads, "elastic.mirror") for item, blob in copies.items()}

    def restore(self) -> None:
        """Restores this rank's part of the agreed commit."""
        if self.agreed:
            self._apply(self.held[self.agreed].own_values)

    def recover(self) -> None:
        """Distributes all parts of the newest agreed commit after a change of ranks. All ranks call it together."""
        reports = allgather_object((self.agreed, self._everything(), self._inventory()), name="elastic.recover")
        newest = max(agreed for agreed, _, _ in reports)
        if newest == 0:
            return  # there is no commit yet: every rank keeps its initial values
        everything = next(items for agreed, items, _ in reports if agreed == newest)
        sources = _sources(everything, newest, [inventory for _, _, inventory in reports])
        holdings = self._holdings(newest)
        own_values = self._move(owners(everything, runtime.world.engine.size), sources, holdings)
        staged = Holding(own_values, self._copied(own_values), everything)
        # The old parts and copies are kept until every rank has the new ones, because a rank may be lost now, even
        # repeatedly.
        before = Holding(everything=everything)
        for holding in holdings:
            before.own_values |= holding.own_values
            before.copies |= holding.copies
        self.held, self.agreed, self._staged = {newest: before}, newest, staged
        ops.barrier()
        self._settle(newest, staged)
        self._apply(own_values)
        for part in self.parts.values():
            part.settle()

    def _everything(self) -> list[Item]:
        return self.held[self.agreed].everything if self.agreed else []

    def _holdings(self, number: int) -> list[Holding]:
        staged = self._staged if number == self.agreed else None
        return [one for one in (self.held.get(number), staged) if one is not None]

    def _inventory(self) -> dict[int, tuple[list[Item], list[Item]]]:
        """For each commit: the items of this rank's own part, and the items of which it has copies."""
        return {
            number: (
                [item for one in self._holdings(number) for item in one.own_values],
                [item for one in self._holdings(number) for item in one.copies],
            )
            for number in self.held
        }

    def _move(self, targets: dict[Item, int], sources: dict[Item, int], holdings: list[Holding]) -> Blobs:
        rank = runtime.world.engine.rank
        here: Blobs = {}
        for holding in reversed(holdings):
            here |= {**holding.copies, **holding.own_values}
        payloads: dict[int, Blobs] = {}
        for item, target in targets.items():
            if sources[item] == rank:
                payloads.setdefault(target, {})[item] = here[item]
        return {item: blob for blobs in exchange(payloads, "elastic.move") for item, blob in blobs.items()}

    def _apply(self, own_values: Blobs) -> None:
        for name, part in self.parts.items():
            part.apply({key: loads(blob) for (owner, key), blob in own_values.items() if owner == name})

    def values(self) -> dict[str, dict[Key, Any]]:
        """This rank's own parts of the agreed commit."""
        parts: dict[str, dict[Key, Any]] = {name: {} for name in self.parts}
        for (name, key), blob in (self.held[self.agreed].own_values if self.agreed else {}).items():
            parts[name][key] = loads(blob)
        return parts

    def adopt(self, number: int, values: dict[str, dict[Key, Any]]) -> None:
        """Takes all parts of a commit that was read from disk. `recover` distributes them."""
        own_values = {(name, key): dumps(value) for name, part in values.items() for key, value in part.items()}
        self._settle(number, Holding(own_values, {}, list(own_values)))
        self._apply(own_values)

    def bytes(self) -> int:
        """The memory that commits of sharded parts use on this rank."""
        return sum(holding.bytes() for holding in self.held.values())


def _sources(
    known: Iterable[Item], number: int, reports: Sequence[dict[int, tuple[list[Item], ...]]]
) -> dict[Item, int]:
    """The rank that sends each item: its owner, else the rank with the copy. Raises LostShards if both are lost."""
    found: dict[Item, int] = {}
    for kind in (1, 0):
        for rank in reversed(range(len(reports))):
            for item in reports[rank].get(number, ([], []))[kind]:
                found[item] = rank
    lost = [item for item in known if item not in found]
    if lost:
        names = ", ".join(f"{name}[{key!r}]" for name, key in lost[:10])
        raise LostShards(
            f"{len(lost)} sharded parts of commit {number} are lost ({names}): the ranks that held them and those with "
            "their copies were lost at the same time; start again from a checkpoint (farandole.elastic.load_from)"
        )
    return found
