# The backend as an object in Python that torch puts into its own process group, for the devices that it serves.
# Touches torch; the room bindings.private; the file operations. Imported where torch has `dist.BackendBase`.
"""Torch itself composes "cpu:farandole,cuda:nccl" and records what groups do; no private method is overridden."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import distributed as dist

from ...bindings.private.torch_names import timeout_of
from .operations import Operations


class DeviceBackend(Operations, dist.BackendBase):  # type: ignore[misc]
    """The operations under the names that torch's group calls."""

    supports_coalescing = True

    @property
    def options(self) -> Any:
        """The options that torch copies for a part of the group."""
        chosen = dist.BackendBase.Options("farandole", self._timeout)
        chosen.global_ranks_in_group = list(self.ranks)
        chosen.group_name = self._name
        return chosen

    def split(self, store: Any, ranks: Sequence[int], opts: Any) -> Any:
        """A backend for some members, given by their indices; None on other ranks. Torch calls it on all members."""
        self._splits += 1
        if self.members.me not in ranks:
            return None  # torch 2.15, which has no BackendBase, could not handle None
        # Two splits with the same members have the same name and store, unless the caller gives names.
        store = dist.PrefixStore(f"split/{self._splits}", store)
        return self.part(ranks, store, timeout_of(opts), opts.group_name)
