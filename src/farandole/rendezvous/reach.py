# Finds out by trying which of several addresses reaches a host.
# Touches sockets.
"""An address of the hub works if the process there proves the job's secret; one of a rank, if a probe arrives."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence

from farandole.rendezvous import sockets
from farandole.rendezvous.flow import READ, Flow, Loop, Wait, send
from farandole.rendezvous.handshake import NOBODY, Greeting, Role, call
from farandole.rendezvous.secret import Secret


def reach(addresses: Sequence[str], secret: Secret, seconds: float) -> tuple[str | None, str]:
    """Tries all addresses at once: the first where the hub of this job answers, or None and why not."""
    loop = Loop()
    found: list[str] = []
    reasons: list[str] = []
    deadline = time.monotonic() + seconds

    def spawn(address: str) -> None:
        def done(result: bool | None, error: Exception | None) -> None:
            if result:
                found.append(address)
            else:
                reasons.append(f"{address}: {sockets.explain(error or EOFError())}")

        loop.spawn(probe_hub(address, secret), deadline, done)

    try:
        for address in addresses:
            spawn(address)
        while not found and len(reasons) < len(addresses):
            loop.turn(deadline)
    finally:
        loop.close()
    return (found[0] if found else None), "; ".join(reasons)


def probe_hub(address: str, secret: Secret, agent: int = 0) -> Flow[bool]:
    """True when the hub of this job answers there; raises otherwise. The hub learns which `agent` asks."""
    sock = yield from sockets.connect(address)
    try:
        yield from call(sock, secret, Greeting(Role.AGENT, agent, NOBODY), Role.HUB)
    finally:
        sock.close()
    return True


def send_probe(addresses: Sequence[str], probe: bytes, seconds: float) -> None:
    """Sends the probe to all addresses at once."""
    loop = Loop()
    ended: list[object] = []
    deadline = time.monotonic() + seconds
    try:
        for address in addresses:
            loop.spawn(_send(address, probe), deadline, lambda *outcome: ended.append(outcome))
        while len(ended) < len(addresses):
            loop.turn(deadline)
    finally:
        loop.close()


def read_probes(listener: socket.socket, length: int, seconds: float) -> set[bytes]:
    """The probes of this length that arrived; afterwards the queue of the listener is empty."""
    loop = Loop()
    found: set[bytes] = set()
    try:
        while (sock := sockets.accept(listener)) is not None:
            with contextlib.closing(sock), contextlib.suppress(OSError):
                found.add(loop.finish(_take(sock, length), time.monotonic() + seconds))
    finally:
        loop.close()
    return found


def _send(address: str, probe: bytes) -> Flow[None]:
    sock = yield from sockets.connect(address)
    with contextlib.closing(sock):
        yield from send(sock, probe)


def _take(sock: socket.socket, length: int) -> Flow[bytes]:
    data = b""
    while len(data) < length:
        try:
            more = sock.recv(length - len(data))
        except (BlockingIOError, InterruptedError):
            yield Wait(sock, READ)
            continue
        if not more:
            break
        data += more
    return data
