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
from collections.abc import Callable, Sequence

from farandole.rendezvous import sockets
from farandole.rendezvous.channel import Channel
from farandole.rendezvous.door import MOST_STRANGERS, Door
from farandole.rendezvous.flow import Flow, Loop
from farandole.rendezvous.handshake import NOBODY, Greeting, Proven, Role, VersionMismatch, answer
from farandole.rendezvous.messages import Again, Message, Removed, Sorry
from farandole.rendezvous.rounds import Rounds, Sends
from farandole.rendezvous.secret import Secret

CALLERS = (Role.WORKER, Role.AGENT)  # an agent only tries whether this address works
GOODBYE_SECONDS = 5.0  # a refused rank has this long to read why and to hang up

log = logging.getLogger("farandole.rendezvous")


class Hub:
    """The meeting point of one job of `size` ranks; listens from construction on, works between start() and close().

    While all ranks are in and running nobody else can belong to the job, and it does not listen at all; when one of
    them leaves, and may come again, it listens where it did before.
    """

    def __init__(
        self,
        secret: Secret,
        size: int,
        addresses: str | Sequence[str],
        package: str,
        rounds: Rounds | None = None,
        loop: Loop | None = None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """`rounds`: who decides, if it is not the usual one; `loop`: whose thread does the work; `after` each event."""
        self._secret = secret
        self._rounds = rounds or Rounds(size, package)
        self._loop = loop or Loop()
        self._guest = loop is not None  # in a loop that somebody else turns
        self._after = after
        self.on_agent: Callable[[int], None] = lambda number: None  # an agent has knocked
        self._names = itertools.count(1)
        self._channels: dict[int, Channel] = {}
        self._closing = False
        self._starved = False
        self._thread: threading.Thread | None = None
        self._size = size
        self._doors: list[Door[Proven]] = []
        self._refused_before = 0  # at doors that are closed
        try:
            for address in [addresses] if isinstance(addresses, str) else addresses:
                self._doors.append(self._door(address))
        except BaseException:
            self._close_doors()
            if not self._guest:
                self._loop.close()
            raise
        self.addresses = [door.address for door in self._doors]

    @property
    def address(self) -> str:
        """The first address."""
        return self.addresses[0]

    @property
    def refused(self) -> int:
        """How many strangers were turned away."""
        return self._refused_before + sum(door.refused for door in self._doors)

    def start(self) -> None:
        """Begins to answer, on a thread of its own unless it is a guest in somebody's loop."""
        if self._guest:
            for door in self._doors:
                door.open()
            return
        self._thread = threading.Thread(target=self._run, name="farandole-hub", daemon=True)
        self._thread.start()

    def absent(self, rank: int, reason: str) -> None:
        """Tells those who wait that this rank will not come. Safe from any thread."""
        self._loop.call(lambda: self.deliver(self._rounds.absent(rank, reason)))

    def drop(self, name: int) -> None:
        """Closes a connection; who decides knows it already. In the loop."""
        channel = self._channels.pop(name, None)
        if channel is not None:
            self._loop.at(name, None, lambda: None)
            # Read before the end: the launcher lives, and has gone on without this rank.
            channel.send(Again("the others have gone on without this rank"))
            channel.close()

    def close(self) -> None:
        """Stops, closes every connection, removes the socket's file."""

        def stop() -> None:
            self._closing = True

        if not self._guest:
            self._loop.call(stop)
        if self._thread is not None:
            self._thread.join()
        self._close_doors()
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        if not self._guest:
            self._loop.close()

    def _run(self) -> None:
        for door in self._doors:
            door.open()
        try:
            while not self._closing:
                self._loop.turn()
        except Exception:
            # Better no hub than one that forgets: every rank notices the end of its connection at once.
            log.exception("the hub failed")
            for channel in self._channels.values():
                channel.close()

    def _door(self, address: str) -> Door[Proven]:
        most = MOST_STRANGERS + self._size  # all ranks may knock at once
        return Door(self._loop, address, most, self._talk, self._admit, self._other_version, self._starve)

    def _close_doors(self) -> None:
        for door in self._doors:
            door.close()
        self._refused_before = self.refused
        self._doors.clear()

    def _open_doors(self) -> None:
        for address in self.addresses:
            try:
                door = self._door(address)
            except FileNotFoundError:
                continue  # the job's directory goes with its last host: nobody will come again
            except OSError as error:
                log.error("ranks that call init again will not find the launcher at %s: %s", address, error)
                continue
            door.open()
            self._doors.append(door)

    def _talk(self, sock: socket.socket) -> Flow[Proven]:
        return answer(sock, self._secret, Greeting(Role.HUB, NOBODY, 0), lambda peer: peer.role in CALLERS)

    def _other_version(self, error: VersionMismatch) -> None:
        log.error("a rank of this job was refused: %s", error)  # it has proven itself, so this is no stranger's doing

    def _starve(self, error: OSError) -> None:
        if not self._starved:
            self._starved = True
            log.error("the launcher cannot accept connections: %s", sockets.explain(error))

    def _admit(self, sock: socket.socket, proven: Proven) -> None:
        if proven.peer.role is Role.AGENT:
            sock.close()
            self.on_agent(proven.peer.rank)
            return
        name = next(self._names)

        def heard(message: Message) -> None:
            self.deliver(self._rounds.message(name, message, time.monotonic()))

        def ended(reason: str) -> None:
            self._channels.pop(name, None)
            self._loop.at(name, None, lambda: None)
            self.deliver(self._rounds.gone(name, reason, time.monotonic()))

        self._channels[name] = Channel(self._loop, sock, proven, heard, ended)

    def deliver(self, sends: Sends) -> None:
        """Sends what has been decided. In the loop."""
        while self._rounds.notices:
            log.warning("%s", self._rounds.notices.pop(0))
        for name, message in sends:
            channel = self._channels.get(name)
            if channel is None:
                continue
            channel.send(message)
            if isinstance(message, Sorry | Again | Removed):
                # Closing now could destroy the message on its way; the rank hangs up when it has read it.
                self._loop.at(name, time.monotonic() + GOODBYE_SECONDS, functools.partial(self._hang_up, name))
        self._loop.at("rounds", self._rounds.deadline(), self._tick)
        if self._rounds.complete() and self._doors:
            self._close_doors()
        elif not self._rounds.complete() and not self._doors:
            self._open_doors()
        self._after()

    def _tick(self) -> None:
        self.deliver(self._rounds.tick(time.monotonic()))

    def _hang_up(self, name: int) -> None:
        channel = self._channels.pop(name, None)
        if channel is not None:
            channel.close()
            self.deliver(self._rounds.gone(name, "it was sent away", time.monotonic()))
