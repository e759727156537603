# A hub inside rank 0, for jobs that no launcher of ours started, and how its guests find out where it can be reached.
# Touches sockets through hub, door and handshake.
"""One hub serves one round: it stops listening before the round is told to start and never listens again."""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from farandole.rendezvous import sockets
from farandole.rendezvous.flow import Flow, Loop
from farandole.rendezvous.handshake import NOBODY, Greeting, Proven, Role, call
from farandole.rendezvous.hub import Hub
from farandole.rendezvous.messages import Started
from farandole.rendezvous.rounds import Sends
from farandole.rendezvous.secret import Secret


class GuestHub(Hub):
    """`complete()` is called once, on the hub's thread, when all are linked and before anybody is told so.

    Whoever calls init again afterwards finds no trace of this round.
    """

    def __init__(
        self, secret: Secret, size: int, addresses: Sequence[str], package: str, complete: Callable[[], None]
    ) -> None:
        super().__init__(secret, size, addresses, package)
        self._complete = complete
        self._reached = threading.Event()
        self._reached_at = ""
        _HUBS.add(self)

    def reached(self, seconds: float) -> str | None:
        """Waits for a guest from another host; the address of ours that it came to."""
        return self._reached_at if self._reached.wait(seconds) else None

    def abandon(self) -> None:
        """In a forked child: closes this process's copies and says nothing to anybody."""
        for door in self._doors:
            door.abandon()
        for channel in self._channels.values():
            channel.sock.close()
        self._doors.clear()
        self._channels.clear()
        self._thread = None
        self._loop.abandon()

    def close(self) -> None:
        _HUBS.discard(self)
        super().close()

    def _admit(self, sock: socket.socket, proven: Proven) -> None:
        if not self._reached.is_set() and sock.family != socket.AF_UNIX:
            name, port = sock.getsockname()[:2]
            self._reached_at = f"tcp:[{name}]:{port}" if ":" in name else f"tcp:{name}:{port}"
            self._reached.set()
        super()._admit(sock, proven)

    def _deliver(self, sends: Sends) -> None:
        if any(isinstance(message, Started) for _, message in sends):
            self._close_doors()
            self._complete()
        super()._deliver(sends)

    def _open_doors(self) -> None:
        pass


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

        loop.spawn(_knock(address, secret), deadline, done)

    try:
        for address in addresses:
            spawn(address)
        while not found and len(reasons) < len(addresses):
            loop.turn(deadline)
    finally:
        loop.close()
    return (found[0] if found else None), "; ".join(reasons)


def _knock(address: str, secret: Secret) -> Flow[bool]:
    sock = yield from sockets.connect(address)
    try:
        yield from call(sock, secret, Greeting(Role.AGENT, 0, NOBODY), Role.HUB)
    finally:
        sock.close()
    return True


# Children forked by the user would keep the hub's connections open and hide the death of this rank.
_HUBS: weakref.WeakSet[GuestHub] = weakref.WeakSet()


def _forget_in_child() -> None:
    for hub in list(_HUBS):
        hub.abandon()
    _HUBS.clear()


os.register_at_fork(after_in_child=_forget_in_child)
