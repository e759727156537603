# Which of several addresses leads to a host: found by trying, not by guessing.
# Touches sockets.
"""An address of the hub counts if whoever answers there proves the job's secret; one of a rank, if a note arrives."""

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

        loop.spawn(knock(address, secret), deadline, done)

    try:
        for address in addresses:
            spawn(address)
        while not found and len(reasons) < len(addresses):
            loop.turn(deadline)
    finally:
        loop.close()
    return (found[0] if found else None), "; ".join(reasons)


def knock(address: str, secret: Secret, agent: int = 0) -> Flow[bool]:
    """True when the hub of this job answers there; an error otherwise. It hears which `agent` it is."""
    sock = yield from sockets.connect(address)
    try:
        yield from call(sock, secret, Greeting(Role.AGENT, agent, NOBODY), Role.HUB)
    finally:
        sock.close()
    return True


def leave_note(addresses: Sequence[str], note: bytes, seconds: float) -> None:
    """Tries all addresses at once and leaves the note wherever somebody takes it."""
    loop = Loop()
    ended: list[object] = []
    deadline = time.monotonic() + seconds
    try:
        for address in addresses:
            loop.spawn(_drop(address, note), deadline, lambda *outcome: ended.append(outcome))
        while len(ended) < len(addresses):
            loop.turn(deadline)
    finally:
        loop.close()


def read_notes(listener: socket.socket, length: int, seconds: float) -> set[bytes]:
    """The notes of this length that were left there; afterwards nobody waits at the door."""
    loop = Loop()
    found: set[bytes] = set()
    try:
        while (visitor := sockets.accept(listener)) is not None:
            with contextlib.closing(visitor), contextlib.suppress(OSError):
                found.add(loop.finish(_take(visitor, length), time.monotonic() + seconds))
    finally:
        loop.close()
    return found


def _drop(address: str, note: bytes) -> Flow[None]:
    sock = yield from sockets.connect(address)
    with contextlib.closing(sock):
        yield from send(sock, note)


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
