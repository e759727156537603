# The hub: where the ranks of a job meet. Runs in the launcher, on one thread.
# Touches sockets and rounds; decides nothing itself.
"""Proves ranks through its door and carries their messages to `Rounds`, which decides."""

from __future__ import annotations

import functools
import itertools
import logging
import socket
import threading
import time

from farandole.rendezvous import sockets
from farandole.rendezvous.channel import Channel
from farandole.rendezvous.door import MOST_STRANGERS, Door
from farandole.rendezvous.flow import Flow, Loop
from farandole.rendezvous.handshake import NOBODY, Greeting, Proven, Role, VersionMismatch, answer
from farandole.rendezvous.messages import Message, Sorry
from farandole.rendezvous.rounds import Rounds, Sends
from farandole.rendezvous.secret import Secret

GOODBYE_SECONDS = 5.0  # a refused rank has this long to read why and to hang up

log = logging.getLogger("farandole.rendezvous")


class Hub:
    """The meeting point of one job of `size` ranks; listens from construction on, works between start() and close()."""

    def __init__(self, secret: Secret, size: int, address: str, package: str) -> None:
        self._secret = secret
        self._rounds = Rounds(size, package)
        self._loop = Loop()
        self._names = itertools.count(1)
        self._channels: dict[int, Channel] = {}
        self._closing = False
        self._starved = False
        self._thread: threading.Thread | None = None
        try:
            most = MOST_STRANGERS + size  # all ranks may knock at once
            self._door: Door[Proven] = Door(
                self._loop, address, most, self._talk, self._admit, self._other_version, self._starve
            )
        except BaseException:
            self._loop.close()
            raise
        self.address = self._door.address

    @property
    def refused(self) -> int:
        """How many strangers were turned away."""
        return self._door.refused

    def start(self) -> None:
        """Begins to answer, on a thread of its own."""
        self._thread = threading.Thread(target=self._run, name="farandole-hub", daemon=True)
        self._thread.start()

    def absent(self, rank: int, reason: str) -> None:
        """Tells those who wait that this rank will not come. Safe from any thread."""
        self._loop.call(lambda: self._deliver(self._rounds.absent(rank, reason)))

    def close(self) -> None:
        """Stops, closes every connection, removes the socket's file."""

        def stop() -> None:
            self._closing = True

        self._loop.call(stop)
        if self._thread is not None:
            self._thread.join()
        self._door.close()
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        self._loop.close()

    def _run(self) -> None:
        self._door.open()
        try:
            while not self._closing:
                self._loop.turn()
        except Exception:
            # Better no hub than one that forgets: every rank notices the end of its connection at once.
            log.exception("the hub failed")
            for channel in self._channels.values():
                channel.close()

    def _talk(self, sock: socket.socket) -> Flow[Proven]:
        return answer(sock, self._secret, Greeting(Role.HUB, NOBODY, 0), lambda peer: peer.role is Role.WORKER)

    def _other_version(self, error: VersionMismatch) -> None:
        log.error("a rank of this job was refused: %s", error)  # it has proven itself, so this is no stranger's doing

    def _starve(self, error: OSError) -> None:
        if not self._starved:
            self._starved = True
            log.error("the launcher cannot accept connections: %s", sockets.explain(error))

    def _admit(self, sock: socket.socket, proven: Proven) -> None:
        name = next(self._names)

        def heard(message: Message) -> None:
            self._deliver(self._rounds.message(name, message, time.monotonic()))

        def ended(reason: str) -> None:
            self._channels.pop(name, None)
            self._loop.at(name, None, lambda: None)
            self._deliver(self._rounds.gone(name, reason))

        self._channels[name] = Channel(self._loop, sock, proven, heard, ended)

    def _deliver(self, sends: Sends) -> None:
        for name, message in sends:
            channel = self._channels.get(name)
            if channel is None:
                continue
            channel.send(message)
            if isinstance(message, Sorry):
                # Closing now could destroy the message on its way; the rank hangs up when it has read it.
                self._loop.at(name, time.monotonic() + GOODBYE_SECONDS, functools.partial(self._hang_up, name))
        self._loop.at("rounds", self._rounds.deadline(), self._tick)

    def _tick(self) -> None:
        self._deliver(self._rounds.tick(time.monotonic()))

    def _hang_up(self, name: int) -> None:
        channel = self._channels.pop(name, None)
        if channel is not None:
            channel.close()
            self._deliver(self._rounds.gone(name, "it was sent away"))
