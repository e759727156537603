# A hub inside rank 0, for jobs that another launcher started.
# Touches sockets through the hub.
"""It serves one round: it stops listening before the round starts and never listens again."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence

from farandole.base.forks import abandoned_in_children
from farandole.rendezvous.handshake import Proven
from farandole.rendezvous.hub import Hub
from farandole.rendezvous.messages import Started
from farandole.rendezvous.phases import Sends
from farandole.rendezvous.secret import Secret

# Forked children would keep the hub's connections open and hide the death of this rank.
_HUBS = abandoned_in_children()


class RankHub(Hub):
    """`complete()` is called once, on the hub's thread, when all ranks are linked and before any rank knows it.

    A rank that calls init again afterwards finds nothing of this round.
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
        """Waits for a rank of another host; the address of this hub that it reached."""
        return self._reached_at if self._reached.wait(seconds) else None

    def abandon(self) -> None:
        """In a forked child: closes this process's copies and sends nothing."""
        for listener in self._listeners:
            listener.abandon()
        for channel in self._channels.values():
            channel.sock.close()
        self._listeners.clear()
        self._channels.clear()
        self._thread = None
        self._loop.abandon()

    def close(self) -> None:
        _HUBS.discard(self)
        super().close()

    def authenticated(self, sock: socket.socket, proven: Proven) -> None:
        if not self._reached.is_set() and sock.family != socket.AF_UNIX:
            name, port = sock.getsockname()[:2]
            self._reached_at = f"tcp:[{name}]:{port}" if ":" in name else f"tcp:{name}:{port}"
            self._reached.set()
        super().authenticated(sock, proven)

    def deliver(self, sends: Sends) -> None:
        if any(isinstance(message, Started) for _, message in sends):
            self._close_listeners()
            self._complete()
        super().deliver(sends)

    def _open_listeners(self) -> None:
        pass
