# The rendezvous of torch.distributed in a job of our launcher, or of a launcher that the package detects.
# Touches torch; the rooms base, clusters, operations, rendezvous and world.
"""torch needs MASTER_ADDR and MASTER_PORT. If they are not set, rank 0 serves a store and announces its address."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from torch import distributed as dist

from ...base.config import Config, environment
from ...clusters import ClusterError, detect
from ...operations import ops
from ...operations.objects import broadcast_object
from ...rendezvous import interfaces, sockets
from ...rendezvous.reach import read_probes, send_probe
from ...world.basics import init
from ...world.runtime import runtime

NOTE_BYTES = 16
NOTE_SECONDS = 3.0  # an address that gives no answer costs this time once
REMEDY = "set MASTER_ADDR and MASTER_PORT, or name the interface with HOROVOD_GLOO_IFACE"


def answer(original: Callable[..., Any], url: str, timeout: timedelta = dist.default_pg_timeout, **more: Any) -> Any:
    """Handles `env://`. If torch's variables are not set, torch would fail; our launcher knows all ranks."""
    has_address = all(environment().get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
    return original(url, timeout=timeout, **more) if has_address or not launched() else meet(timeout)


def launched() -> bool:
    """Whether this process knows its rank in a job."""
    if runtime.initialized:
        return True
    config = Config.from_environment()
    try:
        return config.rendezvous is not None or detect(environment(), config.launcher) is not None
    except ClusterError:
        return False  # torch's own error explains better what is missing


def meet(timeout: timedelta) -> Iterator[tuple[Any, int, int]]:
    """Gives the store, this process's rank and the number of ranks, once; torch reads the first item."""
    init()
    engine = runtime.world.engine
    if engine.rank != 0:
        host, port = _found()
        yield dist.TCPStore(host, port, engine.size, False, timeout), engine.rank, engine.size
        return
    descriptor, address = _listener()
    sockaddr = sockets.split(address)
    assert isinstance(sockaddr, tuple)
    # The store takes over the descriptor. It has no authentication; if all ranks are on one host, it listens on
    # loopback only.
    store = dist.TCPStore(*sockaddr, engine.size, True, timeout, wait_for_workers=False, master_listen_fd=descriptor)
    broadcast_object(sockaddr, 0)
    yield store, engine.rank, engine.size


def _listener() -> tuple[int, str]:
    """On rank 0: a listening socket at an address that every host can reach, found by trying all addresses."""
    world = runtime.world
    visitors = _visitors()
    if not visitors:
        listener, address = sockets.listen("tcp:127.0.0.1")
        return listener.detach(), address
    names = tuple((world.config.gloo_iface or "").replace(",", " ").split())
    offered = [sockets.listen(f"tcp:{each}") for each in interfaces.candidates(names)]
    notes = {rank: secrets.token_bytes(NOTE_BYTES) for rank in visitors}
    broadcast_object(([address for _, address in offered], notes), 0)
    ops.barrier()  # every probe has been sent or has failed
    chosen: tuple[int, str] | None = None
    for listener, address in offered:
        left = read_probes(listener, NOTE_BYTES, NOTE_SECONDS) if chosen is None else set()
        if chosen is None and left >= set(notes.values()):
            chosen = listener.detach(), address
        else:
            listener.close()
    if chosen is None:
        tried = ", ".join(address for _, address in offered) or "none"
        text = f"no address of rank 0's host is reached by every other host (tried: {tried})"
        broadcast_object(text, 0)
        raise dist.DistNetworkError(f"{text}; {REMEDY}")
    return chosen


def _found() -> tuple[str, int]:
    """On the other ranks: the address of rank 0's store."""
    visitors = _visitors()
    if visitors:
        addresses, notes = broadcast_object(None, 0)
        if runtime.world.engine.rank in visitors:
            send_probe(addresses, notes[runtime.world.engine.rank], NOTE_SECONDS)
        ops.barrier()
    found = broadcast_object(None, 0)
    if isinstance(found, str):
        raise dist.DistNetworkError(f"{found}; {REMEDY}")
    host, port = found
    return host, port


def _visitors() -> list[int]:
    """One rank of each host, without the host of rank 0."""
    hosts = runtime.world.session.hosts
    first = {host: rank for rank, host in reversed(list(enumerate(hosts)))}
    return sorted(rank for host, rank in first.items() if host != hosts[0])
