# Links: which ranks are linked at init, and how one link is made, authenticated and checked for shared memory.
# Touches sockets and memory files.
"""A link is one connected stream, or several over TCP, between two ranks that have both proven the job's secret.

The lower rank connects and the higher rank answers. Ranks of one host also pass each other a memory file with a nonce
and read it back: only then they count as ranks of one host.
"""

from __future__ import annotations

import fcntl
import hmac
import mmap
import os
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from farandole.rendezvous import sockets
from farandole.rendezvous.flow import READ, WRITE, Flow, Loop, Task, Wait, pause, receive, send
from farandole.rendezvous.handshake import Greeting, Role, VersionMismatch, answer, call
from farandole.rendezvous.listener import MAX_UNAUTHENTICATED, Listener
from farandole.rendezvous.secret import Secret

FULL_MESH_RANKS = 64  # up to this many ranks, init links each rank with all others
ALL_PAIRS_HOSTS = 32  # up to this many hosts, init links all ranks of the same local rank
RETRY_SECONDS = 0.02
REFUSED_RETRY_SECONDS = 1.0  # a refused connection is retried for this long: the hub may learn the cause meanwhile
HEAD_START_SECONDS = 0.1  # before the next address of a peer is tried as well
POLL_SECONDS = 0.005
_NONCE = 16

T = TypeVar("T")


def initial_links(rank: int, hosts: Sequence[int]) -> tuple[set[int], set[int]]:
    """(peers on this host, peers on other hosts) to link at init. Both sides compute the same answer."""
    local = {peer for peer, host in enumerate(hosts) if host == hosts[rank] and peer != rank}
    others = [peer for peer, host in enumerate(hosts) if host != hosts[rank]]
    if len(hosts) <= FULL_MESH_RANKS:
        return local, set(others)
    count = max(hosts) + 1
    local_ranks: list[int] = []
    taken = [0] * count
    for host in hosts:
        local_ranks.append(taken[host])
        taken[host] += 1
    remote = set()
    for peer in others:
        # Rank 0 coordinates the first group, so every rank needs a link to it.
        if (
            rank == 0
            or peer == 0
            or (local_ranks[peer] == local_ranks[rank] and _near(hosts[rank], hosts[peer], count))
        ):
            remote.add(peer)
    return local, remote


def _near(one: int, other: int, count: int) -> bool:
    """Whether ring, tree, doubling or barrier need this link: its distance in the ring of hosts is a power of two."""
    ahead = (one - other) % count
    return count <= ALL_PAIRS_HOSTS or ahead.bit_count() == 1 or (count - ahead).bit_count() == 1


def prove_memory(sock: socket.socket) -> Flow[str]:
    """Checks that both sides of a unix socket can map each other's memory files: "" or what went wrong.

    Each side sends a file with a nonce, maps the other's file and sends back what it reads: 17 bytes in all.
    """
    nonce = os.urandom(_NONCE)
    problem = ""
    try:
        own_file = _memory_file(nonce)
    except OSError as error:
        problem, own_file = f"no memory file ({sockets.explain(error)})", -1
    try:
        yield from _send_file(sock, own_file)
    finally:
        if own_file >= 0:
            os.close(own_file)
    peer_file = yield from _receive_file(sock)
    seen = bytes(_NONCE)
    try:
        if peer_file >= 0:
            with mmap.mmap(peer_file, _NONCE, mmap.MAP_SHARED, mmap.PROT_READ) as page:
                seen = page[:]
        else:
            problem = problem or "no memory file arrived"
    except (OSError, ValueError) as error:
        problem = problem or f"a memory file cannot be mapped ({error})"
    finally:
        if peer_file >= 0:
            os.close(peer_file)
    yield from send(sock, seen)
    echo = yield from receive(sock, _NONCE)
    if not problem and not hmac.compare_digest(echo, nonce):
        problem = "the other side read other bytes from a memory file than were written"
    return problem


def _memory_file(nonce: bytes) -> int:
    fd = os.memfd_create("farandole-proof", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, nonce)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _send_file(sock: socket.socket, fd: int) -> Flow[None]:
    while True:
        try:
            socket.send_fds(sock, [b"\x01"], [fd] if fd >= 0 else [])
            return
        except (BlockingIOError, InterruptedError):
            yield Wait(sock, WRITE)


def _receive_file(sock: socket.socket) -> Flow[int]:
    while True:
        try:
            data, fds, _, _ = socket.recv_fds(sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, InterruptedError):
            yield Wait(sock, READ)
            continue
        if not data:
            raise EOFError("the other side closed the connection")
        return fds[0] if fds else -1


@dataclass(frozen=True)
class LinkStream:
    """An authenticated connection: stream `number` of the link to `peer`."""

    peer: int
    number: int
    problem: str = ""  # why the two share no memory, although they should


class Listeners:
    """The listeners of one rank, one for each of its addresses."""

    def __init__(self, listeners: Sequence[Listener[LinkStream]]) -> None:
        self._listeners = listeners
        self.address = ",".join(listener.address for listener in listeners)

    def open(self) -> None:
        """Starts accepting."""
        for listener in self._listeners:
            listener.open()

    def close(self) -> None:
        """Closes all of them."""
        for listener in self._listeners:
            listener.close()

    def abandon(self) -> None:
        """In a forked child: closes only this process's copies."""
        for listener in self._listeners:
            listener.abandon()


def first(flows: Sequence[Flow[socket.socket]], loop: Loop) -> Flow[socket.socket]:
    """The result of the first flow that succeeds; each starts a little after the one before. Raises the last error if
    none
    succeeds."""
    if len(flows) == 1:
        return (yield from flows[0])
    found: list[socket.socket] = []
    errors: list[Exception] = []
    tasks: list[Task[socket.socket]] = []

    def done(sock: socket.socket | None, error: Exception | None) -> None:
        if sock is not None:
            found.append(sock)
        else:
            errors.append(error or EOFError())

    began = time.monotonic()
    try:
        while not found:
            late = time.monotonic() - began > HEAD_START_SECONDS * len(tasks)
            if len(tasks) < len(flows) and (late or len(errors) == len(tasks)):
                tasks.append(loop.spawn(flows[len(tasks)], None, done))
            elif len(errors) == len(flows):
                raise errors[-1]
            else:
                yield from pause(POLL_SECONDS)
    except BaseException:
        for sock in found:
            sock.close()
        raise
    finally:
        for task in tasks:
            loop.cancel(task)
        for sock in found[1:]:
            sock.close()
    return found[0]


def none_if_closed(sock: socket.socket, talk: Flow[T]) -> Flow[T | None]:
    """The result of an exchange over `sock`; None, after a pause, when the other side closed early, as a crowded
    listener
    does. Without a result the socket is closed.
    """
    try:
        return (yield from talk)
    except (EOFError, ConnectionError):
        sock.close()
        yield from pause(RETRY_SECONDS)
        return None
    except BaseException:
        sock.close()
        raise


class LinkBuilder:
    """Makes the links of one kind for one rank in one generation. The owner of the loop reads `made` and `failed`."""

    def __init__(self, loop: Loop, secret: Secret, rank: int, size: int, kind: int) -> None:
        self._loop = loop
        self._secret = secret
        self._rank = rank
        self._size = size
        self._kind = kind
        self.generation = 0
        self.streams = 1  # of one link
        self.wanted: set[int] = set()
        self.made: dict[int, list[socket.socket]] = {}
        self._begun: dict[int, dict[int, socket.socket]] = {}  # by peer: the streams of incomplete links
        self.failed: dict[int, str] = {}
        self.no_descriptors: OSError | None = None  # why no connection could be accepted

    def set_rank(self, rank: int, size: int) -> None:
        """Sets the rank. In an elastic job a process learns it only when the round is complete."""
        self._rank = rank
        self._size = size

    def listener(self, addresses: str) -> Listeners:
        """Listens at each address for expected peers of lower rank; accepts them after `open`."""
        most = MAX_UNAUTHENTICATED + self._size * self.streams  # all peers may connect at once
        made: list[Listener[LinkStream]] = []
        last_error: OSError | None = None
        for address in sockets.split_addresses(addresses):
            try:
                made.append(Listener(self._loop, address, most, self))
            except OSError as error:  # an address that appears or disappears just now
                last_error = error
        if not made and last_error is not None:
            raise last_error
        return Listeners(made)

    def want(self, peers: Iterable[int]) -> None:
        """From now on these peers may connect."""
        self.wanted |= set(peers)

    def call(self, peer: int, address: str, deadline: float) -> None:
        """Connects to a higher rank; the outcome appears in `made` or `failed`."""
        self.wanted.add(peer)

        def done(result: tuple[socket.socket, LinkStream] | None, error: Exception | None) -> None:
            if result is None:
                self.failed[peer] = f"{address}: {sockets.explain(error or EOFError())}"
            else:
                self._settle(*result)

        for number in range(self.streams):
            self._loop.spawn(self._call(peer, number, address), deadline, done)

    def settled(self) -> bool:
        """Whether every expected link is made or has failed."""
        return len(self.made) + len(self.failed) >= len(self.wanted)

    def take(self) -> dict[int, list[socket.socket]]:
        """Gives the complete links to the caller and closes incomplete ones."""
        made, self.made = self.made, {}
        for streams in self._begun.values():
            for sock in streams.values():
                sock.close()
        self._begun.clear()
        return made

    def _settle(self, sock: socket.socket, stream: LinkStream) -> None:
        begun = self._begun.setdefault(stream.peer, {})
        if stream.problem or stream.peer in self.made or stream.number in begun or stream.number >= self.streams:
            sock.close()
            if stream.peer not in self.made:
                self.failed.setdefault(stream.peer, stream.problem or "it opened one stream twice")
            return
        begun[stream.number] = sock
        if len(begun) == self.streams:
            self.made[stream.peer] = [begun[number] for number in range(self.streams)]
            del self._begun[stream.peer]

    def _greeting(self, role: Role, target: int) -> Greeting:
        return Greeting(role, self._rank, target, self.generation)

    def _call(self, peer: int, number: int, addresses: str) -> Flow[tuple[socket.socket, LinkStream]]:
        """Connects until the peer answers at one of its addresses."""
        while True:
            sock = yield from first(
                [self._reach(peer, each) for each in sockets.split_addresses(addresses)], self._loop
            )
            if (stream := (yield from none_if_closed(sock, self._introduce(sock, peer, number)))) is not None:
                return sock, stream

    def _introduce(self, sock: socket.socket, peer: int, number: int) -> Flow[LinkStream]:
        """The caller's side of `authenticate`, after the handshake."""
        problem = (yield from prove_memory(sock)) if self._kind == sockets.LOCAL else ""
        # Only now the peer counts this connection as a stream, and confirms it. Connections to other addresses send
        # no number.
        yield from send(sock, bytes([number]))
        yield from receive(sock, 1)
        return LinkStream(peer, number, problem)

    def _reach(self, peer: int, address: str) -> Flow[socket.socket]:
        """An authenticated connection to this address."""
        began = time.monotonic()
        while True:
            try:
                sock = yield from sockets.connect(address)
            except (ConnectionRefusedError, ConnectionResetError):
                if self._kind == sockets.LOCAL or time.monotonic() > began + REFUSED_RETRY_SECONDS:
                    raise
                yield from pause(RETRY_SECONDS)
                continue
            handshake = call(sock, self._secret, self._greeting(Role.CALLER, peer), Role.CALLEE)
            if (yield from none_if_closed(sock, handshake)) is not None:
                return sock

    # What the listeners call.

    def authenticate(self, sock: socket.socket) -> Flow[LinkStream]:
        """Authenticates a peer, and learns which of its streams this is."""
        me = self._greeting(Role.CALLEE, 0)
        proven = yield from answer(sock, self._secret, me, self._admit)
        problem = (yield from prove_memory(sock)) if self._kind == sockets.LOCAL else ""
        number = yield from receive(sock, 1)
        yield from send(sock, number)
        return LinkStream(proven.peer.rank, number[0], problem)

    def on_no_descriptors(self, error: OSError) -> None:
        """Notes why no peer can connect."""
        self.no_descriptors = error

    def other_version(self, error: VersionMismatch) -> None:
        """The peer itself reports it."""

    def _admit(self, peer: Greeting) -> bool:
        return peer.role is Role.CALLER and peer.rank in self.wanted and peer.rank not in self.made

    def authenticated(self, sock: socket.socket, stream: LinkStream) -> None:
        """Takes over a stream of a peer."""
        self._settle(sock, stream)
