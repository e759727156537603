# The state of an optimizer with shard_optimizer_state=True as sharded elastic state: each rank's share, and its copy.
# Touches torch, sharding, sharded_optimizer and elastic/mirror.
"""A commit has one piece for each rank; after a change of ranks, they are divided again among the current ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...elastic.mirror import Key, LostShards, Sharded, exchange
from ..sharded_optimizer import ShardedSteps, is_divided
from ..sharding import Bucket

State = dict[str, Any]  # of one bucket's share


class OptimizerShards(Sharded):
    """The part of a commit for a sharded optimizer: for the index of each rank, the state of its shares."""

    def __init__(self, optimizer: ShardedSteps) -> None:
        super().__init__()
        self.optimizer = optimizer
        self._cut: list[State] | None = None  # this rank's part of the commit after a change of ranks

    def collect(self) -> dict[Key, Any]:
        """This rank's piece in its present state."""
        self._cut = None
        shares = self.optimizer._gradients
        if not shares.in_this_world():
            if self.optimizer.state:
                raise LostShards(
                    "ranks were lost before the first commit, and with them their shares of the state that the "
                    "optimizer was given; start the job again"
                )
            shares.cut()
            self.optimizer.load_shares([{}] * len(shares.buckets), self.optimizer.options())
        self._values = {shares.index: {"ranks": shares.ranks, "state": self._states()}}
        return self._values

    def apply(self, values: dict[Key, Any]) -> None:
        """Returns to a commit. If ranks have changed, `settle` does it instead."""
        super().apply(values)
        shares = self.optimizer._gradients
        if not shares.in_this_world():
            return
        own = values.get(shares.index)
        if self._cut is not None:
            self._load([_copied(items) for items in self._cut])
        elif own is not None and own["ranks"] == shares.ranks:
            self._load(own["state"])

    def settle(self) -> None:
        """Divides the pieces of all ranks again and gives each rank its share. Every byte of the state is sent once."""
        shares = self.optimizer._gradients
        shares.cut()
        payloads = {
            target: [
                [_overlap(items, bucket, int(index), piece["ranks"], target) for items, bucket in pairs]
                for index, piece in self._values.items()
                for pairs in [list(zip(piece["state"], shares.buckets, strict=True))]
            ]
            for target in range(shares.ranks)
        }
        states: list[State] = [{} for _ in shares.buckets]
        for pieces in exchange(payloads, "elastic.shares"):
            for piece in pieces:
                for state, bucket, part in zip(states, shares.buckets, piece, strict=True):
                    _put(state, bucket, part)
        self._cut = [_copied(items) for items in states]
        self._load(states)

    def _states(self) -> list[State]:
        optimizer = self.optimizer
        return [_on_host(optimizer.state.get(bucket.shard, {})) for bucket in optimizer._gradients.buckets]

    def _load(self, states: Sequence[State]) -> None:
        self.optimizer.load_shares(states, self.optimizer.options())


def _on_host(items: State) -> State:
    return {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in items.items()}


def _copied(items: State) -> State:
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in items.items()}


def _overlap(items: State, bucket: Bucket, member: int, ranks: int, target: int) -> dict[str, tuple[int, Any]]:
    """The part that the share of `target` takes from the share of rank `index` of `ranks`: where it begins, and values.

    It takes all of what is not divided (the number of steps); the beginning is then -1.
    """
    share = -(-bucket.elements // ranks)
    found: dict[str, tuple[int, Any]] = {}
    for key, value in items.items():
        if not is_divided(value, (share,), key):
            found[key] = (-1, value)
            continue
        begin = max(member * share, target * bucket.share)
        end = min((member + 1) * share, (target + 1) * bucket.share, bucket.elements)
        part = value[begin - member * share : max(begin, end) - member * share]
        found[key] = (begin, part.clone())  # a copy, because sending a view would send all memory after it
    return found


def _put(state: State, bucket: Bucket, part: dict[str, tuple[int, Any]]) -> None:
    for key, (begin, value) in part.items():
        if begin < 0:
            state[key] = value
            continue
        row = state.setdefault(key, torch.zeros(bucket.share, dtype=value.dtype))
        if len(value):
            row[begin - bucket.begin : begin - bucket.begin + len(value)] = value
