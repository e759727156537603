# Attacks on an address: everything except a correct handshake.
# Touches sockets.
"""`say(address, data)` and the table `attacks`."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
from collections.abc import Callable

from farandole.rendezvous.handshake import NOBODY, Greeting, Role
from farandole.rendezvous.secret import Secret


class Bomb:
    """Unpickling this would make a directory that tests look for."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, (self.path,)


def connect(address: str) -> socket.socket:
    """A blocking connection."""
    kind, _, place = address.partition(":")
    if kind == "unix":
        sock = socket.socket(socket.AF_UNIX)
        target: str | tuple[str, int] = place
    else:
        sock = socket.socket(socket.AF_INET)
        target = ("127.0.0.1", int(place.rpartition(":")[2]))
    sock.settimeout(10)
    try:
        sock.connect(target)
    except BaseException:
        sock.close()
        raise
    return sock


def greeting(role: Role = Role.CALLER) -> bytes:
    """A well-formed greeting of another job."""
    return Greeting(role, 0, NOBODY if role is Role.WORKER else 1, 1).encode(Secret.create().job(), os.urandom(32))


def attacks(bomb: str) -> dict[str, bytes]:
    """The bytes of each attack, by its name; the empty one only connects and closes."""
    http = b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: " + b"x" * 100 + b"\r\n\r\n"
    return {
        "nothing": b"",
        "one byte": b"F",
        "noise": os.urandom(64 << 10),
        "http": http,
        "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(506),
        "pickle": pickle.dumps(Bomb(bomb)) + bytes(200),
        "another job's rank": greeting() + os.urandom(32),
        "another job's worker": greeting(Role.WORKER) + os.urandom(32),
        "half a greeting": greeting()[:30],
    }


def say(address: str, data: bytes) -> None:
    """Connects, sends, and leaves without listening."""
    with contextlib.suppress(OSError), connect(address) as sock:
        sock.sendall(data)
