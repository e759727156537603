# The hub: all ranks of a job connect to it. It runs in the launcher, on one thread.
# Touches sockets; decides nothing itself.
"""Authenticates ranks and passes their messages to `Rounds` or `ElasticDriver`, which decide."""

from __future__ import annotations

import functools
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from farandole.rendezvous import sockets
from farandole.rendezvous.channel import Channel
from farandole.rendezvous.flow import Flow, Loop
from farandole.rendezvous.handshake import NOBODY, Greeting, Proven, Role, VersionMismatch, answer
from farandole.rendezvous.listener import MAX_UNAUTHENTICATED, Listener
from farandole.rendezvous.messages import Message, Rejected, Removed, Retry
from farandole.rendezvous.phases import Sends
from farandole.rendezvous.rounds import Rounds
from farandole.rendezvous.secret import Secret

CALLERS = (Role.WORKER, Role.AGENT)  # an agent only checks whether this address works
CLOSE_SECONDS = 5.0  # a refused rank has this long to read the reason and to close

log = logging.getLogger("farandole.rendezvous")


class Membership(Protocol):
    """Who is in the job. Members are numbers that the hub gives to connections; time is an argument."""

    def message(self, member: int, message: Message, now: float) -> Sends:
        """Handles a message of a member."""
        ...

    def connection_lost(self, member: int, reason: str, now: float) -> Sends:
        """Handles the end of a member's connection."""
        ...

    def process_ended(self, rank: int, reason: str) -> Sends:
        """Handles that the process of a rank has ended, so it will not join."""
        ...

    def tick(self, now: float) -> Sends:
        """Does what is due."""
        ...

    def deadline(self) -> float | None:
        """The next moment at which `tick` must be called."""
        ...

    def complete(self) -> bool:
        """Whether all ranks run together, so that no other rank can join."""
        ...

    def take_warnings(self) -> list[str]:
        """Warnings for the user, each once."""
        ...


class Hub:
    """The hub of one job of `size` ranks. It listens from construction on and works between start() and close().

    While all ranks are in and running, no other process can belong to the job, and the hub does not listen. When a rank
    leaves it may join again, so the hub listens again at the same addresses.
    """

    def __init__(
        self,
        secret: Secret,
        size: int,
        addresses: str | Sequence[str],
        package: str,
        membership: Membership | None = None,
        loop: Loop | None = None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """`membership`: decides instead of `Rounds`; `loop`: its thread does the work; `after`: called after each
        event."""
        self._secret = secret
        self._membership: Membership = membership or Rounds(size, package)
        self._loop = loop or Loop()
        self._external_loop = loop is not None  # the loop belongs to the caller, who turns it
        self._after = after
        self.on_agent: Callable[[int], None] = lambda number: None  # called when an agent has connected
        self.on_warning: Callable[[str], None] = lambda text: None  # called when the user was warned
        self._names = itertools.count(1)
        self._channels: dict[int, Channel] = {}
        self.admitted = 0  # how many connections of ranks it has accepted
        self._closing = False
        self._reported_descriptors = False
        self._thread: threading.Thread | None = None
        self._size = size
        self._listeners: list[Listener[Proven]] = []
        self._refused_before = 0  # by listeners that are closed now
        try:
            for address in [addresses] if isinstance(addresses, str) else addresses:
                self._listeners.append(self._listen(address))
        except BaseException:
            self._close_listeners()
            if not self._external_loop:
                self._loop.close()
            raise
        self.addresses = [listener.address for listener in self._listeners]

    @property
    def address(self) -> str:
        """The first address."""
        return self.addresses[0]

    @property
    def refused(self) -> int:
        """How many connections did not authenticate."""
        return self._refused_before + sum(listener.refused for listener in self._listeners)

    def start(self) -> None:
        """Starts to answer, on its own thread unless the caller gave it a loop."""
        if self._external_loop:
            for listener in self._listeners:
                listener.open()
            return
        self._thread = threading.Thread(target=self._run, name="farandole-hub", daemon=True)
        self._thread.start()

    def absent(self, rank: int, reason: str) -> None:
        """Tells waiting ranks that this rank will not come. Safe from any thread."""
        self._loop.call(lambda: self.deliver(self._membership.process_ended(rank, reason)))

    def drop(self, name: int) -> None:
        """Closes a connection; `membership` knows it already. Call it on the loop's thread."""
        channel = self._channels.pop(name, None)
        if channel is not None:
            self._loop.at(name, None, lambda: None)
            # The rank reads this before the end of the connection, so it knows that the launcher still runs.
            channel.send(Retry("the other ranks went on without this rank"))
            channel.close()

    def close(self) -> None:
        """Stops, closes every connection and removes the socket's file."""

        def stop() -> None:
            self._closing = True

        if not self._external_loop:
            self._loop.call(stop)
        if self._thread is not None:
            self._thread.join()
        self._close_listeners()
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        if not self._external_loop:
            self._loop.close()

    def _run(self) -> None:
        for listener in self._listeners:
            listener.open()
        try:
            while not self._closing:
                self._loop.turn()
        except Exception:
            # No hub is better than one with wrong state: every rank sees the end of its connection at once.
            log.exception("the hub failed")
            for channel in self._channels.values():
                channel.close()

    def _listen(self, address: str) -> Listener[Proven]:
        most = MAX_UNAUTHENTICATED + self._size  # all ranks may connect at once
        return Listener(self._loop, address, most, self)

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._refused_before = self.refused
        self._listeners.clear()

    def _open_listeners(self) -> None:
        for address in self.addresses:
            try:
                listener = self._listen(address)
            except FileNotFoundError:
                continue  # the last rank of the host has removed the directory: no rank joins again
            except OSError as error:
                log.error("ranks that call init again will not find the launcher at %s: %s", address, error)
                continue
            listener.open()
            self._listeners.append(listener)

    # What the listeners call.

    def authenticate(self, sock: socket.socket) -> Flow[Proven]:
        """Authenticates a rank or an agent."""
        return answer(sock, self._secret, Greeting(Role.HUB, NOBODY, 0), lambda peer: peer.role in CALLERS)

    def other_version(self, error: VersionMismatch) -> None:
        """Reports a rank with another version."""
        log.error("a rank of this job was refused: %s", error)  # it has proven itself, so it is a rank of this job

    def on_no_descriptors(self, error: OSError) -> None:
        """Reports, once, that no rank can connect."""
        if not self._reported_descriptors:
            self._reported_descriptors = True
            log.error("the launcher cannot accept connections: %s", sockets.explain(error))

    def authenticated(self, sock: socket.socket, proven: Proven) -> None:
        """Takes over the connection of a rank or an agent."""
        if proven.peer.role is Role.AGENT:
            sock.close()
            self.on_agent(proven.peer.rank)
            return
        self.admitted += 1
        name = next(self._names)

        def on_message(message: Message) -> None:
            self.deliver(self._membership.message(name, message, time.monotonic()))

        def ended(reason: str) -> None:
            self._channels.pop(name, None)
            self._loop.at(name, None, lambda: None)
            self.deliver(self._membership.connection_lost(name, reason, time.monotonic()))

        self._channels[name] = Channel(self._loop, sock, proven, on_message, ended)

    def deliver(self, sends: Sends) -> None:
        """Sends the messages that `membership` decided. Call it on the loop's thread."""
        for text in self._membership.take_warnings():
            log.warning("%s", text)
            self.on_warning(text)
        for name, message in sends:
            channel = self._channels.get(name)
            if channel is None:
                continue
            channel.send(message)
            if isinstance(message, Rejected | Retry | Removed):
                # Closing now could lose the message; the rank closes when it has read it.
                self._loop.at(name, time.monotonic() + CLOSE_SECONDS, functools.partial(self._close_channel, name))
        self._loop.at("rounds", self._membership.deadline(), self._tick)
        if self._membership.complete() and self._listeners:
            self._close_listeners()
        elif not self._membership.complete() and not self._listeners:
            self._open_listeners()
        self._after()

    def _tick(self) -> None:
        self.deliver(self._membership.tick(time.monotonic()))

    def _close_channel(self, name: int) -> None:
        channel = self._channels.pop(name, None)
        if channel is not None:
            channel.close()
            self.deliver(self._membership.connection_lost(name, "the launcher rejected it", time.monotonic()))
