# Which addresses this host has, and whether a name means this host.
# Touches the kernel's list of interfaces and name look-up.
"""Interfaces that are up, with their IPv4 and IPv6 addresses. Loopback and link-local ones are only for this host."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from dataclasses import dataclass

_SIOCGIFCONF = 0x8912
_SIOCGIFFLAGS = 0x8913
_IFREQ_BYTES = 40  # one entry on 64-bit systems
_UP, _RUNNING = 0x1, 0x40


@dataclass(frozen=True)
class Interface:
    """One address of one interface."""

    name: str
    address: str

    @property
    def loopback(self) -> bool:
        """Whether only this host can use it."""
        return ipaddress.ip_address(self.address).is_loopback


def interfaces() -> list[Interface]:
    """All addresses of the interfaces that are up, IPv4 first; no link-local IPv6 addresses."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        up = {name for _, name in socket.if_nameindex() if _flags(sock, name) & (_UP | _RUNNING) == _UP | _RUNNING}
        found = [one for one in _ipv4(sock) if one.name.partition(":")[0] in up]
    return found + [one for one in _ipv6() if one.name in up]


def candidates(names: tuple[str, ...] = ()) -> list[str]:
    """The addresses at which other hosts may reach this one; with `names`, only those of these interfaces.

    Raises ValueError when one of `names` has no address; the text lists the interfaces that have one.
    """
    all_addresses = interfaces()
    missing = [name for name in names if name not in {one.name for one in all_addresses}]
    if missing:
        known = ", ".join(sorted({one.name for one in all_addresses}))
        raise ValueError(f"no interface {missing[0]} that is up and has an address on this host (there are: {known})")
    if names:
        return [one.address for one in all_addresses if one.name in names]
    return [one.address for one in all_addresses if not one.loopback]


def source_address(host: str, port: int) -> str:
    """The local address that a connection to `host` would use; nothing is sent."""
    family, _, _, _, remote = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect(remote)
        return str(sock.getsockname()[0]).partition("%")[0]


def address_of(name: str) -> str | None:
    """The IPv4 address of a host; None when the name cannot be resolved."""
    with contextlib.suppress(OSError, UnicodeError):
        return socket.gethostbyname(name)
    return None


def is_this_host(name: str) -> bool:
    """Whether a host name or address means this machine."""
    name = name.rpartition("@")[2]
    if name in ("localhost", "127.0.0.1", "::1", socket.gethostname()):
        return True
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return False  # it may be an alias from the configuration of ssh
    local_addresses = {one.address for one in interfaces()}
    return bool(found) and all(str(address).partition("%")[0] in local_addresses for address in found)


def _flags(sock: socket.socket, name: str) -> int:
    request = struct.pack("16sH14x", name.encode()[:15], 0)
    with contextlib.suppress(OSError):
        flags: int = struct.unpack("16xH", fcntl.ioctl(sock.fileno(), _SIOCGIFFLAGS, request)[:18])[0]
        return flags
    return 0


def _ipv4(sock: socket.socket) -> list[Interface]:
    import array

    buffer = array.array("B", bytes(256 * _IFREQ_BYTES))
    start, _ = buffer.buffer_info()
    answer = fcntl.ioctl(sock.fileno(), _SIOCGIFCONF, struct.pack("iL", len(buffer), start))
    length = struct.unpack("iL", answer)[0]
    data = buffer.tobytes()[:length]
    found = []
    for offset in range(0, length, _IFREQ_BYTES):
        name = data[offset : offset + 16].partition(b"\0")[0].decode(errors="replace")
        found.append(Interface(name, socket.inet_ntoa(data[offset + 20 : offset + 24])))
    return found


def _ipv6() -> list[Interface]:
    found = []
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as table:
        for line in table:
            hexadecimal, _, _, _, _, name = line.split()
            address = ipaddress.IPv6Address(bytes.fromhex(hexadecimal))
            if not address.is_link_local:
                found.append(Interface(name, str(address)))
    return found
