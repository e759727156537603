# The session of a rank: its links from init, links made later on request, and its channel to the hub.
# Touches the hub's channel and sockets; hands descriptors to the engine.
"""What `mesh.join` returns. Its one thread sleeps until the hub or the engine needs something."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from farandole.base import errors
from farandole.base.forks import abandoned_in_children
from farandole.rendezvous import sockets
from farandole.rendezvous.channel import Channel
from farandole.rendezvous.flow import Loop, Stream
from farandole.rendezvous.links import LinkBuilder, Listeners
from farandole.rendezvous.messages import (
    Leave,
    LinkRefused,
    LinkRequest,
    ListenAddress,
    ListenRequest,
    Lost,
    MembershipUpdate,
    Message,
    Retry,
    WaitReport,
)
from farandole.rendezvous.rates import Rates
from farandole.rendezvous.secret import Secret
from farandole.rendezvous.stragglers import report_seconds

ON_DEMAND_SECONDS = 30.0  # a requested link must be made within this time
CLOSE_SECONDS = 0.5

log = logging.getLogger("farandole.rendezvous")


# Forked children (data loaders) would keep the connection to the hub open and hide the death of this rank.
_SESSIONS = abandoned_in_children()

Links: TypeAlias = dict[int, tuple[list[int], int]]  # peer -> descriptors of its streams, kind


class LinkReceiver(Protocol):
    """What a session needs from an engine."""

    def add_link(self, peer: int, fd: int, kind: int) -> None:
        """Takes over a connected descriptor; called once for each stream of a link, in order."""
        ...

    def watch_links(self, wanted: Callable[[int], None]) -> None:
        """Will call `wanted(peer)` when it needs a link."""
        ...

    def revoke(self, code: int, rank: int, message: str) -> None:
        """Ends every operation."""
        ...


class Session:
    """One rank in one generation. The session owns `links` until `hand_over`."""

    def __init__(
        self,
        rank: int,
        hosts: Sequence[int],
        generation: int,
        links: Links,
        streams: int = 1,
        secret: Secret | None = None,
        loop: Loop | None = None,
        channel: Channel | None = None,
        listen_at: str = "",
        names: Sequence[str] = (),
        numbers: Sequence[int] = (),
    ) -> None:
        self.rank = rank
        self.size = len(hosts)
        self.hosts = list(hosts)
        self.names = list(names)  # the host name of each rank
        self.numbers = tuple(numbers)  # rank, size, local rank ... of this generation, in an elastic job
        self.generation = generation
        self.links = links
        self.streams = streams  # of a link over TCP
        self._secret = secret
        self._loop = loop
        self._channel = channel
        self._listen_at = listen_at
        self._engine: LinkReceiver | None = None
        self._hub_lost: Callable[[str], None] | None = None
        self._updated: Callable[[MembershipUpdate], None] = lambda message: None
        self._lost: Callable[[], None] = lambda: None
        self._waited: Callable[[], int] | None = None
        self._reported = (0, 0)  # time of the last report, and nanoseconds waited until then
        self._rates = Rates()  # of streams that the engine has
        self._listeners: dict[int, tuple[Listeners, LinkBuilder]] = {}
        self._requested: set[int] = set()  # peers whose link the engine needs
        self._linked: set[int] = set()  # peers whose link the engine has
        self._connecting: dict[int, LinkBuilder] = {}  # peers that this rank is connecting to
        self._early: list[Message] = []  # messages of the hub that came before the engine
        self._lost_early: str | None = None
        self._evicted = False
        self._thread: threading.Thread | None = None
        self._closing = False
        _SESSIONS.add(self)

    def hand_over(self, engine: LinkReceiver) -> None:
        """Gives every link of init to the engine."""
        while self.links:
            peer, (streams, kind) = next(iter(self.links.items()))
            self._linked.add(peer)
            while streams:
                if kind == sockets.TCP:
                    self._rates.add(peer, streams[0])
                engine.add_link(peer, streams.pop(0), kind)
            del self.links[peer]

    def serve(
        self,
        engine: LinkReceiver,
        hub_lost: Callable[[str], None] | None = None,
        updated: Callable[[MembershipUpdate], None] = lambda message: None,
        lost: Callable[[], None] = lambda: None,
        waited: Callable[[], int] | None = None,
    ) -> None:
        """Starts the thread that makes links on request. `hub_lost(reason)` is called instead of revoking the
        generation.

        On that thread, `updated(message)` is called when workers want to join or must leave, and `lost()` when a rank
        is lost. `waited()`: how many nanoseconds this rank has waited for others; reports of it go to the hub.
        """
        if self._channel is None or self._loop is None or self._thread is not None:
            return
        self._engine = engine
        self._hub_lost = hub_lost
        self._updated = updated
        self._lost = lost
        self._waited = waited
        self._thread = threading.Thread(target=self._run, name="farandole-session", daemon=True)
        self._loop.call(self._deliver_early)
        self._thread.start()
        engine.watch_links(self.request_link)

    def request_link(self, peer: int) -> None:
        """Requests a link to a peer; the engine gets it when it is made. Safe from any thread."""
        loop, channel = self._loop, self._channel  # close() may clear them meanwhile
        if loop is not None and channel is not None:
            self._requested.add(peer)
            loop.call(lambda: channel.send(LinkRequest(self.generation, peer)))

    def close(self, again: int = 0) -> None:
        """Tells the hub that this rank leaves and closes what was not handed over. A second call does nothing.

        `again`: 1 to join the next generation of an elastic job at once, 2 to leave because it was asked to, 3 as 1,
        after its save callbacks have run.
        """
        _SESSIONS.discard(self)
        if self._loop is None or self._channel is None:
            self._close_links()
            return

        def stop() -> None:
            self._closing = True

        if self._thread is not None and self._thread is not threading.current_thread():
            self._loop.call(stop)
            self._thread.join()
        self._thread = None
        for listener, builder in self._listeners.values():
            listener.close()
            _close_all(builder)
        for builder in self._connecting.values():
            _close_all(builder)
        self._listeners.clear()
        self._connecting.clear()
        if self._channel.open:
            self._channel.send(Leave(self.generation, int(again)))
            _close_after_leave(self._channel.sock)
            self._channel.close()
        self._loop.close()
        self._loop = self._channel = None
        self._close_links()

    def abandon(self) -> None:
        """In a forked child: closes this process's copies and sends nothing."""
        if self._channel is not None:
            self._channel.sock.close()
        for listener, _ in self._listeners.values():
            listener.abandon()
        if self._loop is not None:
            self._loop.abandon()
        self._loop = self._channel = self._thread = None
        self._listeners.clear()
        self._close_links()

    # Channel calls these on the session's thread.

    def handle_message(self, message: Message) -> None:
        """Handles a message from the hub."""
        if getattr(message, "generation", self.generation) != self.generation:
            return
        if self._engine is None:
            self._early.append(message)
            return
        if isinstance(message, ListenRequest):
            self._listen_for(message.peer)
        elif isinstance(message, ListenAddress):
            self._connect(message.peer, message.address)
        elif isinstance(message, LinkRefused):
            # Both ranks may have requested the link; one that is being made reports its own failure.
            if message.peer not in self._listeners and message.peer not in self._connecting:
                self._fail(message.peer, message.text)
        elif isinstance(message, Lost):
            self._lost()
            self._revoke(errors.PEER_LOST, message.rank, message.text)
        elif isinstance(message, MembershipUpdate):
            self._updated(message)
        elif isinstance(message, Retry):
            self._evicted = True
            self._revoke(errors.REVOKED, -1, message.text)

    def ended(self, reason: str) -> None:
        """The connection to the hub has ended: the launcher died or is about to end the job."""
        if self._closing:
            return
        if self._engine is None:
            self._lost_early = reason
        elif self._evicted:
            return
        elif self._hub_lost is not None:
            self._hub_lost(reason)
        else:
            self._revoke(errors.ABORTED, -1, f"the connection to the launcher was lost: {reason}")

    def _deliver_early(self) -> None:
        early, self._early = self._early, []
        for message in early:
            self.handle_message(message)
        if self._lost_early is not None:
            self.ended(self._lost_early)
        if self.size > 1:
            self._report()

    def _report(self) -> None:
        """Tells the hub how long this rank has waited and what it has sent. From all reports the hub finds the slow
        rank.
        """
        if self._waited is None or self._channel is None or self._loop is None:
            return
        try:
            waited = self._waited()
        except Exception as error:  # the engine is closing
            log.debug("this rank sends no more wait reports: %s", error)
            return
        now = time.monotonic_ns()
        began, before = self._reported
        self._reported = (now, waited)
        links = self._rates.report((now - began) / 1e9)
        if began:
            milliseconds = (waited - before) // 1_000_000, (now - began) // 1_000_000
            self._channel.send(WaitReport(self.generation, *milliseconds, links))
        self._loop.at("report", time.monotonic() + report_seconds(self.size), self._report)

    def _run(self) -> None:
        assert self._loop is not None
        try:
            while not self._closing:
                self._loop.turn()
                self._collect()
        except Exception:
            log.exception("the thread that makes links failed")
            self._revoke(errors.INTERNAL, -1, "the thread that makes links failed")

    def _builder(self) -> LinkBuilder:
        assert self._loop is not None and self._secret is not None
        builder = LinkBuilder(self._loop, self._secret, self.rank, self.size, sockets.TCP)
        builder.generation = self.generation
        builder.streams = self.streams
        return builder

    def _listen_for(self, peer: int) -> None:
        assert self._channel is not None and self._loop is not None
        builder = self._builder()
        builder.want([peer])
        try:
            listener = builder.listener(self._listen_at)
        except OSError as error:
            self._channel.send(ListenAddress(self.generation, peer, ""))
            self._fail(peer, f"cannot listen for it: {sockets.explain(error)}")
            return
        listener.open()
        self._listeners[peer] = (listener, builder)
        self._loop.at(("listen", peer), time.monotonic() + ON_DEMAND_SECONDS, lambda: self._give_up(peer))
        self._channel.send(ListenAddress(self.generation, peer, listener.address))

    def _give_up(self, peer: int) -> None:
        listener, builder = self._listeners.pop(peer)
        listener.close()
        _close_all(builder)
        self._fail(peer, f"it did not connect within {ON_DEMAND_SECONDS:g} s")

    def _connect(self, peer: int, address: str) -> None:
        assert self._loop is not None
        builder = self._builder()
        self._connecting[peer] = builder
        builder.call(peer, address, time.monotonic() + ON_DEMAND_SECONDS)

    def _collect(self) -> None:
        for peer, (listener, builder) in list(self._listeners.items()):
            if peer in builder.made:
                del self._listeners[peer]
                assert self._loop is not None
                self._loop.at(("listen", peer), None, lambda: None)
                listener.close()
                self._add(peer, builder.take()[peer])
        for peer, builder in list(self._connecting.items()):
            if not builder.settled():
                continue
            del self._connecting[peer]
            if peer in builder.made:
                self._add(peer, builder.take()[peer])
            else:
                _close_all(builder)
                self._fail(peer, f"cannot be reached at {builder.failed[peer]}")

    def _add(self, peer: int, streams: Sequence[socket.socket]) -> None:
        assert self._engine is not None
        self._linked.add(peer)
        for sock in streams:
            self._rates.add(peer, sock.fileno())
            try:
                self._engine.add_link(peer, sock.detach(), sockets.TCP)
            except Exception as error:  # the engine is closing
                log.debug("the engine did not accept a new link to rank %d: %s", peer, error)

    def _fail(self, peer: int, text: str) -> None:
        if peer in self._linked or peer not in self._requested:
            return  # this rank does not need the link
        self._revoke(errors.PEER_LOST, peer, f"no link to rank {peer}: {text}")

    def _revoke(self, code: int, rank: int, message: str) -> None:
        try:
            if self._engine is not None:
                self._engine.revoke(code, rank, message)
        except Exception as error:  # the engine is closing
            log.debug("the generation could not be revoked (%s): %s", message, error)

    def _close_links(self) -> None:
        while self.links:
            for fd in self.links.popitem()[1][0]:
                os.close(fd)


def close_streams(streams: Sequence[socket.socket]) -> None:
    """Closes a link that is not needed."""
    for sock in streams:
        sock.close()


def _close_all(builder: LinkBuilder) -> None:
    for streams in builder.take().values():
        close_streams(streams)


def _close_after_leave(sock: Stream) -> None:
    # Unread bytes would turn the close into a reset, which could lose the Leave message.
    assert isinstance(sock, socket.socket)
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
        sock.settimeout(CLOSE_SECONDS)
        deadline = time.monotonic() + CLOSE_SECONDS
        while sock.recv(65536) and time.monotonic() < deadline:
            pass
