# horovod.runner.util.network: addresses and interfaces of this host.
# Touches the kernel's list of interfaces and name lookup.
"""For programs that start ranks themselves."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from farandole.rendezvous import interfaces

Server = TypeVar("Server")
PORTS = range(1024, 65536)


def get_local_host_addresses() -> list[str]:
    """All IPv4 addresses of this host."""
    return [one.address for one in interfaces.interfaces() if ":" not in one.address]


def get_local_intfs(nic: str | None = None) -> set[str]:
    """The interfaces of this host that are up; with `nic` only this one."""
    return {one.name for one in interfaces.interfaces() if nic in (None, one.name)}


def resolve_host_address(host_name: str) -> str | None:
    """The IPv4 address of a host; None if the name is unknown."""
    return interfaces.address_of(host_name)


def filter_local_addresses(all_host_names: Iterable[str]) -> list[str]:
    """The names that do not belong to this host."""
    return [name for name in all_host_names if not interfaces.is_this_host(name)]


def find_port(server_factory: Callable[[tuple[str, int]], Server]) -> tuple[Server, int]:
    """Makes a server on a free port with `server_factory(("", port))`. Returns the server and the port."""
    first = random.randrange(len(PORTS))
    failure: Exception | None = None
    for step in range(len(PORTS)):
        port = PORTS[(first + step) % len(PORTS)]
        try:
            return server_factory(("", port)), port
        except OSError as error:
            failure = error
    raise Exception("Unable to find a port to bind to.") from failure


def get_driver_ip(nics: Iterable[str] | None) -> str:
    """An address of this host on one of these interfaces."""
    found: Any = interfaces.candidates(tuple(nics or ())) or get_local_host_addresses()
    if not found:
        raise RuntimeError("Unable to find an IPv4 address of the interfaces; choose other interfaces")
    return str(next((address for address in found if ":" not in address), found[0]))
