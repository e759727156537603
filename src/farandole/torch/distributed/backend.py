# Makes groups of torch.distributed: the default group is this process's world; the members make the other groups.
# Touches torch; the rooms autoload, base, bindings.private, clusters and world; other files of this room.
"""torch calls `create` for `init_process_group("farandole")` and for `new_group`."""

from __future__ import annotations

import os
import secrets
from typing import Any

from torch import distributed as dist

from ...autoload import NAME
from ...base import errors
from ...base.config import Config, environment
from ...bindings.private.torch_names import default_store, leave_unrecorded
from ...clusters import ClusterError, ClusterRank, detect, with_numbers
from ...world.runtime import runtime
from ...world.world import World
from .collectives import Members
from .membership import begin_anew, found
from .operations import Operations, Wrapped


def make(cuda: str, opts: Any, options: Any) -> Any:
    """The object for torch. `cuda`: a backend of torch for CUDA tensors, in addition to ours."""
    if not hasattr(dist, "BackendBase"):  # torch's recorder fails with groups in Python
        for name in dist.Backend.backend_list:
            if NAME in name:
                leave_unrecorded(name)
    if cuda:
        from .composed import compose

        return compose(create, cuda, opts, options)
    return create(opts, group_class())


def group_class() -> type[Operations]:
    """The class of our groups: a backend in torch's own group if torch has a base class for it, else a Group."""
    if hasattr(dist, "BackendBase"):
        from .device_backend import DeviceBackend

        return DeviceBackend
    from .group import Group

    return Group


def create(opts: Any, kind: type[Wrapped]) -> Wrapped:
    """Makes a group for torch; `opts` has its store, ranks and name. Without ranks it is the default group."""
    ranks = list(opts.global_ranks_in_group)
    try:
        if not ranks:
            starts_world = not runtime.initialized
            world = _join(opts.store, opts.group_rank, opts.group_size)
            begin_anew(world)
            members = Members(tuple(range(opts.group_size)), opts.group_rank)
            close = runtime.close if starts_world else lambda: None
            return kind(world, 0, members, opts.store, opts.timeout, opts.group_id, close)
        default = dist.group.WORLD
        world = _join(default_store(), default.rank(), default.size())
        members = Members(tuple(ranks), opts.group_rank)
        number = found(world, members, opts.store)
        return kind(world, number, members, opts.store, opts.timeout, opts.group_id)
    except errors.HorovodInternalError as error:
        raise dist.DistBackendError(f"the group {opts.group_id} could not be made: {error}") from error


def _join(store: Any, rank: int, size: int) -> World:
    """This process's world; joins it if necessary. ValueError unless torch has the same rank and size."""
    if not runtime.initialized:
        config, found = _place(store, rank, size)
        runtime.open(config, [], found)
    world = runtime.world
    if (world.engine.rank, world.engine.size) != (rank, size):
        raise ValueError(
            f"torch.distributed says rank {rank} of {size}, but this process is rank {world.engine.rank} of "
            f"{world.engine.size} in its job; the default group has to be the whole job"
        )
    return world


def _place(store: Any, rank: int, size: int) -> tuple[Config, ClusterRank | None]:
    """The numbers of this process in the job: from its launcher, or else from torch.distributed's store."""
    config = Config.from_environment()
    if config.rendezvous is not None:
        return config, None
    try:
        found = detect(environment(), config.launcher)
    except ClusterError:
        found = None  # torch knows more than the environment variables
    if found is None or (found.rank, found.size) != (rank, size):
        found = _found_in(store, rank, size)
    return with_numbers(config, found), found


def _found_in(store: Any, rank: int, size: int) -> ClusterRank:
    """The numbers in a job for which there is only torch's store."""
    host = os.uname().nodename
    store.set(f"farandole/host/{rank}", host)
    if rank == 0:
        store.set("farandole/key", secrets.token_hex(16))
    key = store.get("farandole/key").decode()
    hosts = [store.get(f"farandole/host/{other}").decode() for other in range(size)]
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    address = f"{store.host}:{store.port}" if isinstance(store, dist.TCPStore) else ""
    return ClusterRank(
        launcher="torchrun",
        title="torch.distributed's store",
        rank=rank,
        size=size,
        local_rank=hosts[:rank].count(host),
        local_size=hosts.count(host),
        hostname=host,
        key=f"torch.distributed {key}",
        store=address,
    )
