# The process group in Python, which replaces torch's own where torch has no base class for backends.
# Touches torch and operations.
"""`init_process_group("farandole")` and `new_group` return a `Group` where there is no `dist.BackendBase`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from .operations import Operations
from .work import Work


class Group(Operations, dist.ProcessGroup):  # type: ignore[misc]
    """The operations under their old and new names, and what torch reads from a group."""

    _description = ""

    # Names before torch 2.13.
    _allgather_base = Operations.all_gather_single
    allgather_into_tensor_coalesced = Operations.all_gather_single_coalesced
    _reduce_scatter_base = Operations.reduce_scatter_single
    reduce_scatter_tensor_coalesced = Operations.reduce_scatter_single_coalesced
    alltoall_base = Operations.all_to_all_single

    def rank(self) -> int:
        """This process's index in the group."""
        return self.members.me

    def size(self) -> int:
        """Number of ranks in the group."""
        return self.members.size

    getRank = rank
    getSize = size
    name = Operations.getBackendName
    _get_backend_name = Operations.getBackendName

    def getGroupName(self) -> str:
        """The name that torch gave the group."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Torch names a group after making it."""
        self._name = name

    def getGroupDesc(self) -> str:
        """The description that the user gave."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Sets the description that the user gave."""
        self._description = description

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        near = [torch.device("cpu")]
        return [*near, torch.device("cuda")] if torch.cuda.is_available() else near

    def get_backend(self, device: Any) -> Any:
        """All devices have the same backend."""
        return self

    def _get_backend(self, device: Any) -> Any:
        return self.get_backend(device)

    def get_group_store(self) -> Any:
        """The key-value store of the group."""
        return self.store

    _set_default_timeout = Operations.set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: the engine has its own numbers."""

    def _start_coalescing(self, device: Any = None) -> None:
        self.start_coalescing()

    def _end_coalescing(self, device: Any = None) -> Work:
        return self.end_coalescing()

    options: Any = None  # this backend has none

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> Group | None:
        """A group of some members, given by their indices; None on the other members. All members must call it."""
        indices = list(new_ranks)
        if len(set(indices)) != len(indices) or not indices or not set(indices) <= set(range(self.members.size)):
            raise ValueError(f"{indices} are not different ranks of a group of {self.members.size}")
        self._splits += 1
        if self.members.me not in indices:
            return None
        store = dist.PrefixStore(f"split/{self._splits}/{indices[0]}", self.store)
        made = self.part(indices, store, timeout, group_name or f"{self._name}:split:{self._splits}")
        made.setGroupDesc(group_desc or f"{self._description}:split:{self._splits}")
        return made
