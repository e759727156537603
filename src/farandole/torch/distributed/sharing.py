# Puts tensors into memory that the ranks of a host share, so that an allreduce works on them in place.
# Touches torch, world.world, and private names of torch through bindings.private.
"""`share(world, tensor, move)` tells the engine about a tensor in shared memory, or first moves it there."""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ...base import errors
from ...bindings.private.torch_names import share_storage
from ...world.world import World

MIN_BYTES = 2 << 20  # the engine does not use shared memory for smaller tensors
SHARED_MEMORY_FOLDER = "/dev/shm"  # where torch keeps tensors in shared memory

_regions: WeakKeyDictionary[World, dict[int, int]] = WeakKeyDictionary()  # by address of the storage


def share(world: World, tensor: torch.Tensor, move: bool) -> bool:
    """Shares the tensor with the ranks of this host; returns whether this worked. `move`: may move it to shared memory.

    Torch's `share_memory_` moves a tensor together with its views. But a NumPy array over the tensor would keep the old
    memory, so tensors of the user are not moved.
    """
    storage = tensor.untyped_storage()
    known = _regions.setdefault(world, {})
    if storage.data_ptr() in known:
        return True
    if world.config.local_size == 1 or not (storage.is_shared() or (move and _has_space_for(storage.nbytes()))):
        return False
    try:
        fd, size = share_storage(storage)
        address = storage.data_ptr()
        known[address] = world.engine.share(fd, address, size)
    except RuntimeError:  # there is no memory, torch has closed the file, or the engine has ended
        return False
    weakref.finalize(storage, _unshare_freed_storage, weakref.ref(world), address).atexit = False
    return True


def _has_space_for(size: int) -> bool:
    """Whether this size fits. Half of /dev/shm stays free for other users of it, such as a DataLoader's workers."""
    try:
        files = os.statvfs(SHARED_MEMORY_FOLDER)
    except OSError:
        return False
    return (files.f_bavail - files.f_blocks // 2) * files.f_frsize >= size


def _unshare_freed_storage(world_reference: Any, address: int) -> None:
    world = world_reference()
    if world is None:
        return
    region = _regions[world].pop(address)
    with contextlib.suppress(errors.HorovodInternalError):  # the engine has ended, and its shared memory with it
        world.engine.unshare(region)
