# Tensors in memory that the ranks of a host share: an allreduce works on them where they lie.
# Touches torch, private and runtime.
"""`share(world, tensor, move)` tells the engine about a tensor in shared memory, or moves it there first."""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ... import errors
from ...private.torch_names import share_storage
from ...runtime import World

LEAST_BYTES = 2 << 20  # the engine does not ask for less
FILES = "/dev/shm"  # where torch keeps tensors that processes share

_regions: WeakKeyDictionary[World, dict[int, int]] = WeakKeyDictionary()  # by address


def share(world: World, tensor: torch.Tensor, move: bool) -> bool:
    """Whether the ranks of this host can reach the tensor. `move`: it may be brought into shared memory for that.

    Torch's own `share_memory_` does that in place, views included; only a NumPy array over the tensor would be left
    behind, so that tensors of the user's stay where they are.
    """
    storage = tensor.untyped_storage()
    known = _regions.setdefault(world, {})
    if storage.data_ptr() in known:
        return True
    if world.config.local_size == 1 or not (storage.is_shared() or (move and _room(storage.nbytes()))):
        return False
    try:
        fd, size = share_storage(storage)
        place = storage.data_ptr()
        known[place] = world.engine.share(fd, place, size)
    except RuntimeError:  # no room after all, a file that torch has closed, or an engine that has ended
        return False
    weakref.finalize(storage, _gone, weakref.ref(world), place).atexit = False
    return True


def _room(size: int) -> bool:
    """Half of the shared memory is left to others, such as a DataLoader's workers."""
    try:
        files = os.statvfs(FILES)
    except OSError:
        return False
    return (files.f_bavail - files.f_blocks // 2) * files.f_frsize >= size


def _gone(reference: Any, place: int) -> None:
    world = reference()
    if world is None:
        return
    region = _regions[world].pop(place)
    with contextlib.suppress(errors.HorovodInternalError):  # the engine has ended, and what it shared with it
        world.engine.unshare(region)
