# The backend in Python: an object that torch puts into a process group of its own, for the devices that it serves.
# Touches torch, private and operations; imported where torch has `dist.BackendBase`.
"""Torch composes "cpu:farandole,cuda:nccl" by itself, and records what its groups do; nothing private is overridden."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import distributed as dist

from ...private.torch_names import timeout_of
from .operations import Operations


class DeviceBackend(Operations, dist.BackendBase):  # type: ignore[misc]
    """Operations under the names by which torch's own group calls them."""

    supports_coalescing = True

    @property
    def options(self) -> Any:
        """What torch copies for a part of the group."""
        chosen = dist.BackendBase.Options("farandole", self._timeout)
        chosen.global_ranks_in_group = list(self.ranks)
        chosen.group_name = self._name
        return chosen

    def split(self, store: Any, ranks: Sequence[int], opts: Any) -> Any:
        """A backend for some of the members, given by their places; None on the others. Torch calls it on all."""
        self._splits += 1
        if self.members.me not in ranks:
            return None  # the trampoline of torch 2.15, which has no BackendBase, does not survive it
        # The same members twice have the same name and store, unless the caller gives names.
        store = dist.PrefixStore(f"split/{self._splits}", store)
        return self.part(ranks, store, timeout_of(opts), opts.group_name)
