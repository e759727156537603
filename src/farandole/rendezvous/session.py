# The session of a rank: its links from init, and later ones when they are wished for; its line to the hub.
# Touches the hub's channel and sockets; hands descriptors to the engine.
"""What `mesh.join` returns. One thread, asleep until the hub or the engine has something to say."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from farandole import errors
from farandole.rendezvous import sockets
from farandole.rendezvous.channel import Channel
from farandole.rendezvous.flow import Loop, Stream
from farandole.rendezvous.links import Doors, Weaver
from farandole.rendezvous.messages import Again, Leave, Lost, Message, NoLink, Offer, Updated, Waited, Wanted, Wish
from farandole.rendezvous.rates import Rates
from farandole.rendezvous.secret import Secret
from farandole.rendezvous.stragglers import report_seconds

ON_DEMAND_SECONDS = 30.0  # a link that is wished for must stand after this time
GOODBYE_SECONDS = 0.5

log = logging.getLogger("farandole.rendezvous")


Links: TypeAlias = dict[int, tuple[list[int], int]]  # peer -> descriptors of its streams, kind


class LinkTaker(Protocol):
    """What a session needs of an engine."""

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
    """One rank in one generation. `links` belong to the session until `hand_over`."""

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
        place: Sequence[int] = (),
    ) -> None:
        self.rank = rank
        self.size = len(hosts)
        self.hosts = list(hosts)
        self.names = list(names)  # the host name of each rank
        self.place = tuple(place)  # rank, size, local rank ... of this generation, in an elastic job
        self.generation = generation
        self.links = links
        self.streams = streams  # of a link over TCP
        self._secret = secret
        self._loop = loop
        self._channel = channel
        self._listen_at = listen_at
        self._engine: LinkTaker | None = None
        self._hub_lost: Callable[[str], None] | None = None
        self._updated: Callable[[Updated], None] = lambda message: None
        self._lost: Callable[[], None] = lambda: None
        self._waited: Callable[[], int] | None = None
        self._reported = (0, 0)  # the moment of the last report and the nanoseconds waited until then
        self._rates = Rates()  # of streams that the engine has
        self._doors: dict[int, tuple[Doors, Weaver]] = {}
        self._wished: set[int] = set()  # peers whose link the engine needs
        self._linked: set[int] = set()  # peers whose link the engine has
        self._calling: dict[int, Weaver] = {}  # peers whose door is being knocked at
        self._early: list[Message] = []  # what the hub said before there was an engine to tell
        self._lost_early: str | None = None
        self._evicted = False
        self._thread: threading.Thread | None = None
        self._closing = False
        _SESSIONS.add(self)

    def hand_over(self, engine: LinkTaker) -> None:
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
        engine: LinkTaker,
        hub_lost: Callable[[str], None] | None = None,
        updated: Callable[[Updated], None] = lambda message: None,
        lost: Callable[[], None] = lambda: None,
        waited: Callable[[], int] | None = None,
    ) -> None:
        """Makes links on demand from now on, on a thread. `hub_lost(reason)`: instead of revoking the generation.

        `updated(message)` hears, on that thread, that somebody wants to come or has to go; `lost()`: a rank is gone.
        `waited()`: for how many nanoseconds this rank has waited for others; the hub hears it now and then.
        """
        if self._channel is None or self._loop is None or self._thread is not None:
            return
        self._engine = engine
        self._hub_lost = hub_lost
        self._updated = updated
        self._lost = lost
        self._waited = waited
        self._thread = threading.Thread(target=self._run, name="farandole-session", daemon=True)
        self._loop.call(self._catch_up)
        self._thread.start()
        engine.watch_links(self.wish)

    def wish(self, peer: int) -> None:
        """Asks for a link to a peer; the engine gets it when it stands. Safe from any thread."""
        loop, channel = self._loop, self._channel  # close() may take them away meanwhile
        if loop is not None and channel is not None:
            self._wished.add(peer)
            loop.call(lambda: channel.send(Wish(self.generation, peer)))

    def close(self, again: int = 0) -> None:
        """Leaves the hub in good order and closes what was not handed over. Calling it again does nothing.

        `again`: 1 to come at once into the next generation of an elastic job, 2 to go because somebody asked for it,
        3 as 1, after it has saved what it would save before it goes.
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
        for door, weaver in self._doors.values():
            door.close()
            _close_all(weaver)
        for weaver in self._calling.values():
            _close_all(weaver)
        self._doors.clear()
        self._calling.clear()
        if self._channel.open:
            self._channel.send(Leave(self.generation, int(again)))
            _say_goodbye(self._channel.sock)
            self._channel.close()
        self._loop.close()
        self._loop = self._channel = None
        self._close_links()

    def abandon(self) -> None:
        """In a forked child: closes this process's copies and says nothing to anybody."""
        if self._channel is not None:
            self._channel.sock.close()
        for door, _ in self._doors.values():
            door.abandon()
        if self._loop is not None:
            self._loop.abandon()
        self._loop = self._channel = self._thread = None
        self._doors.clear()
        self._close_links()

    # What Channel calls, on the thread of the session.

    def heard(self, message: Message) -> None:
        """A message from the hub."""
        if getattr(message, "generation", self.generation) != self.generation:
            return
        if self._engine is None:
            self._early.append(message)
            return
        if isinstance(message, Wanted):
            self._open_ear(message.peer)
        elif isinstance(message, Offer):
            self._call(message.peer, message.address)
        elif isinstance(message, NoLink):
            # Both may have wished for the link; one that is being made has its own end.
            if message.peer not in self._doors and message.peer not in self._calling:
                self._fail(message.peer, message.text)
        elif isinstance(message, Lost):
            self._lost()
            self._revoke(errors.PEER_LOST, message.rank, message.text)
        elif isinstance(message, Updated):
            self._updated(message)
        elif isinstance(message, Again):
            self._evicted = True
            self._revoke(errors.REVOKED, -1, message.text)

    def ended(self, reason: str) -> None:
        """The hub is gone: the launcher died or is about to end the job."""
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

    def _catch_up(self) -> None:
        early, self._early = self._early, []
        for message in early:
            self.heard(message)
        if self._lost_early is not None:
            self.ended(self._lost_early)
        if self.size > 1:
            self._report()

    def _report(self) -> None:
        """Tells the hub how long this rank has waited and what it has sent: the hub hears all and knows who is slow."""
        if self._waited is None or self._channel is None or self._loop is None:
            return
        try:
            waited = self._waited()
        except Exception as error:  # an engine that is closing counts no more
            log.debug("no more reports: %s", error)
            return
        now = time.monotonic_ns()
        began, before = self._reported
        self._reported = (now, waited)
        links = self._rates.report((now - began) / 1e9)
        if began:
            milliseconds = (waited - before) // 1_000_000, (now - began) // 1_000_000
            self._channel.send(Waited(self.generation, *milliseconds, links))
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

    def _weaver(self) -> Weaver:
        assert self._loop is not None and self._secret is not None
        weaver = Weaver(self._loop, self._secret, self.rank, self.size, sockets.TCP)
        weaver.generation = self.generation
        weaver.streams = self.streams
        return weaver

    def _open_ear(self, peer: int) -> None:
        assert self._channel is not None and self._loop is not None
        weaver = self._weaver()
        weaver.want([peer])
        try:
            door = weaver.door(self._listen_at)
        except OSError as error:
            self._channel.send(Offer(self.generation, peer, ""))
            self._fail(peer, f"cannot listen for it: {sockets.explain(error)}")
            return
        door.open()
        self._doors[peer] = (door, weaver)
        self._loop.at(("ear", peer), time.monotonic() + ON_DEMAND_SECONDS, lambda: self._give_up(peer))
        self._channel.send(Offer(self.generation, peer, door.address))

    def _give_up(self, peer: int) -> None:
        door, weaver = self._doors.pop(peer)
        door.close()
        _close_all(weaver)
        self._fail(peer, f"it did not call within {ON_DEMAND_SECONDS:g} s")

    def _call(self, peer: int, address: str) -> None:
        assert self._loop is not None
        weaver = self._weaver()
        self._calling[peer] = weaver
        weaver.call(peer, address, time.monotonic() + ON_DEMAND_SECONDS)

    def _collect(self) -> None:
        for peer, (door, weaver) in list(self._doors.items()):
            if peer in weaver.made:
                del self._doors[peer]
                assert self._loop is not None
                self._loop.at(("ear", peer), None, lambda: None)
                door.close()
                self._add(peer, weaver.take()[peer])
        for peer, weaver in list(self._calling.items()):
            if not weaver.settled():
                continue
            del self._calling[peer]
            if peer in weaver.made:
                self._add(peer, weaver.take()[peer])
            else:
                _close_all(weaver)
                self._fail(peer, f"cannot be reached at {weaver.failed[peer]}")

    def _add(self, peer: int, streams: Sequence[socket.socket]) -> None:
        assert self._engine is not None
        self._linked.add(peer)
        for sock in streams:
            self._rates.add(peer, sock.fileno())
            try:
                self._engine.add_link(peer, sock.detach(), sockets.TCP)
            except Exception as error:  # an engine that is closing takes no more links
                log.debug("a new link to rank %d was not taken: %s", peer, error)

    def _fail(self, peer: int, text: str) -> None:
        if peer in self._linked or peer not in self._wished:
            return  # nobody here needs it
        self._revoke(errors.PEER_LOST, peer, f"no link to rank {peer}: {text}")

    def _revoke(self, code: int, rank: int, message: str) -> None:
        try:
            if self._engine is not None:
                self._engine.revoke(code, rank, message)
        except Exception as error:  # an engine that is closing has nothing left to revoke
            log.debug("not revoked (%s): %s", message, error)

    def _close_links(self) -> None:
        while self.links:
            for fd in self.links.popitem()[1][0]:
                os.close(fd)


def close_streams(streams: Sequence[socket.socket]) -> None:
    """Gives up a link that is not wanted."""
    for sock in streams:
        sock.close()


def _close_all(weaver: Weaver) -> None:
    for streams in weaver.take().values():
        close_streams(streams)


def _say_goodbye(sock: Stream) -> None:
    # Unread bytes would turn the close into a reset, and our Leave might be lost with it.
    assert isinstance(sock, socket.socket)
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
        sock.settimeout(GOODBYE_SECONDS)
        deadline = time.monotonic() + GOODBYE_SECONDS
        while sock.recv(65536) and time.monotonic() < deadline:
            pass


# Children forked by the user (data loaders) would keep the connection to the hub open and hide this rank's death.
_SESSIONS: weakref.WeakSet[Session] = weakref.WeakSet()


def _forget_in_child() -> None:
    for session in list(_SESSIONS):
        session.abandon()
    _SESSIONS.clear()


os.register_at_fork(after_in_child=_forget_in_child)
