# The meeting of torch.distributed in a job that our launcher, or one that the package detects, has started.
# Touches torch, config, runtime, objects, rendezvous and the detection of launchers.
"""torch wants MASTER_ADDR and MASTER_PORT; where nobody has set them, rank 0 serves a store and tells the others."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch import distributed as dist

from ...config import Config, environment
from ...launch.clusters import ClusterError, detect
from ...objects import broadcast_object
from ...rendezvous import interfaces, sockets
from ...runtime import init, runtime


def launched() -> bool:
    """Whether this process knows its place in a job."""
    if runtime.initialized:
        return True
    config = Config.from_environment()
    try:
        return config.rendezvous is not None or detect(environment(), config.launcher) is not None
    except ClusterError:
        return False  # torch's own error about what is missing says more


def meet(timeout: timedelta) -> Iterator[tuple[Any, int, int]]:
    """The store, this process's rank and the number of ranks; torch takes the first of these."""
    init()
    engine = runtime.world.engine
    if engine.rank != 0:
        host, port = broadcast_object(None, 0)
        yield dist.TCPStore(host, port, engine.size, False, timeout), engine.rank, engine.size
        return
    listener, address = sockets.listen(f"tcp:{_host()}")
    place = sockets.split(address)
    assert isinstance(place, tuple)
    # The store takes the descriptor over. It knows no secret: on one host nobody from outside reaches it.
    store = dist.TCPStore(
        *place, engine.size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    broadcast_object(place, 0)
    yield store, engine.rank, engine.size


def _host() -> str:
    """An address of this host by which every rank can reach it."""
    world = runtime.world
    if len(set(world.session.hosts)) == 1:
        return "127.0.0.1"
    found = interfaces.candidates(tuple((world.config.gloo_iface or "").replace(",", " ").split()))
    if not found:
        raise dist.DistNetworkError("this host has no network address by which other ranks could reach its store")
    return found[0]
