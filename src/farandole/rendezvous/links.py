# Links: which ranks are joined at init, and how one link is made, proven, and shown to share memory.
# Touches sockets and memory files.
"""A link is one connected stream, or several over TCP, between two ranks that both have proven the job's secret.

The lower rank calls, the higher one answers. Ranks of one host also pass each other a memory file with a nonce and read
it back: only then do they share a host.
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
from farandole.rendezvous.door import MOST_STRANGERS, Door
from farandole.rendezvous.flow import READ, WRITE, Flow, Loop, Task, Wait, pause, receive, send
from farandole.rendezvous.handshake import Greeting, Role, answer, call
from farandole.rendezvous.secret import Secret

EVERYBODY = 64  # up to this many ranks, each is linked with all at init
NEAR_HOSTS = 32  # up to this many hosts, the same local rank of each is linked
RETRY_SECONDS = 0.02
STUBBORN_SECONDS = 1.0  # a refused connection is tried again for this long: the hub may know more by then
HEAD_START_SECONDS = 0.1  # that an earlier address of a peer has over the next one
LOOK_SECONDS = 0.005
_NONCE = 16

T = TypeVar("T")


def initial_links(rank: int, hosts: Sequence[int]) -> tuple[set[int], set[int]]:
    """(peers on this host, peers on other hosts) that are linked at init. Both sides come to the same answer."""
    local = {peer for peer, host in enumerate(hosts) if host == hosts[rank] and peer != rank}
    others = [peer for peer, host in enumerate(hosts) if host != hosts[rank]]
    if len(hosts) <= EVERYBODY:
        return local, set(others)
    count = max(hosts) + 1
    seats: list[int] = []  # of each rank on its host
    taken = [0] * count
    for host in hosts:
        seats.append(taken[host])
        taken[host] += 1
    remote = set()
    for peer in others:
        # Rank 0 orders the negotiation of the first group, so everybody talks to it.
        if rank == 0 or peer == 0 or (seats[peer] == seats[rank] and _near(hosts[rank], hosts[peer], count)):
            remote.add(peer)
    return local, remote


def _near(one: int, other: int, count: int) -> bool:
    """Ring, tree, doubling and barrier talk over distances of a power of two, round the circle of hosts."""
    ahead = (one - other) % count
    return count <= NEAR_HOSTS or ahead.bit_count() == 1 or (count - ahead).bit_count() == 1


def prove_memory(sock: socket.socket) -> Flow[str]:
    """Whether both sides of a unix socket can map each other's memory files: "" or what went wrong.

    Either side sends a file with a nonce, maps the other's and sends back what it reads there: 17 bytes in all.
    """
    nonce = os.urandom(_NONCE)
    problem = ""
    try:
        mine = _memory_file(nonce)
    except OSError as error:
        problem, mine = f"no memory file ({sockets.explain(error)})", -1
    try:
        yield from _send_file(sock, mine)
    finally:
        if mine >= 0:
            os.close(mine)
    theirs = yield from _receive_file(sock)
    seen = bytes(_NONCE)
    try:
        if theirs >= 0:
            with mmap.mmap(theirs, _NONCE, mmap.MAP_SHARED, mmap.PROT_READ) as page:
                seen = page[:]
        else:
            problem = problem or "no memory file arrived"
    except (OSError, ValueError) as error:
        problem = problem or f"a memory file cannot be mapped ({error})"
    finally:
        if theirs >= 0:
            os.close(theirs)
    yield from send(sock, seen)
    echo = yield from receive(sock, _NONCE)
    if not problem and not hmac.compare_digest(echo, nonce):
        problem = "what was written into a memory file was not read back"
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
class Strand:
    """A proven connection: the `number`th of the link to `peer`."""

    peer: int
    number: int
    problem: str = ""  # why the two share no memory, if they should


class Doors:
    """The doors of one rank at all its addresses, as one."""

    def __init__(self, doors: Sequence[Door[Strand]]) -> None:
        self._doors = doors
        self.address = ",".join(door.address for door in doors)

    def open(self) -> None:
        """Begins to hear."""
        for door in self._doors:
            door.open()

    def close(self) -> None:
        """Closes all of them."""
        for door in self._doors:
            door.close()

    def abandon(self) -> None:
        """In a forked child: closes this process's copies alone."""
        for door in self._doors:
            door.abandon()


def first(flows: Sequence[Flow[socket.socket]], loop: Loop) -> Flow[socket.socket]:
    """What the first flow that succeeds gives, each with a head start over the next; the last error if none does."""
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
                yield from pause(LOOK_SECONDS)
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


def unless_turned_away(sock: socket.socket, talk: Flow[T]) -> Flow[T | None]:
    """What a talk over `sock` gives; None, after a pause, when it was cut short, as happens when strangers crowd the
    door. Without a result the socket is closed.
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


class Weaver:
    """Makes the links of one rank, of one kind, in one generation. The owner of the loop reads `made` and `failed`."""

    def __init__(self, loop: Loop, secret: Secret, rank: int, size: int, kind: int) -> None:
        self._loop = loop
        self._secret = secret
        self._rank = rank
        self._size = size
        self._kind = kind
        self.generation = 0
        self.streams = 1  # that make up a link
        self.wanted: set[int] = set()
        self.made: dict[int, list[socket.socket]] = {}
        self._begun: dict[int, dict[int, socket.socket]] = {}  # by peer: streams of links that lack some
        self.failed: dict[int, str] = {}
        self.starved: OSError | None = None  # why nobody could be let in, lately

    def become(self, rank: int, size: int) -> None:
        """In an elastic job a rank learns its number only when the round is complete."""
        self._rank = rank
        self._size = size

    def door(self, addresses: str) -> Doors:
        """Listens for the lower ones of the wanted ranks, at each address; hears them once it is opened."""
        most = MOST_STRANGERS + self._size * self.streams  # all peers may knock at once
        made: list[Door[Strand]] = []
        trouble: OSError | None = None
        for address in sockets.several(addresses):
            try:
                made.append(
                    Door(self._loop, address, most, self._answer, self._entered, lambda error: None, self._starve)
                )
            except OSError as error:  # an address that is just going, or coming
                trouble = error
        if not made and trouble is not None:
            raise trouble
        return Doors(made)

    def want(self, peers: Iterable[int]) -> None:
        """From now on these peers may call."""
        self.wanted |= set(peers)

    def call(self, peer: int, address: str, deadline: float) -> None:
        """Calls a higher rank; the outcome appears in `made` or `failed`."""
        self.wanted.add(peer)

        def done(result: tuple[socket.socket, Strand] | None, error: Exception | None) -> None:
            if result is None:
                self.failed[peer] = f"{address}: {sockets.explain(error or EOFError())}"
            else:
                self._settle(*result)

        for number in range(self.streams):
            self._loop.spawn(self._call(peer, number, address), deadline, done)

    def settled(self) -> bool:
        """Whether every wanted link stands or has failed."""
        return len(self.made) + len(self.failed) >= len(self.wanted)

    def take(self) -> dict[int, list[socket.socket]]:
        """The links made; they are the caller's from now on. Those half made are given up."""
        made, self.made = self.made, {}
        for streams in self._begun.values():
            for sock in streams.values():
                sock.close()
        self._begun.clear()
        return made

    def _settle(self, sock: socket.socket, stream: Strand) -> None:
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

    def _call(self, peer: int, number: int, addresses: str) -> Flow[tuple[socket.socket, Strand]]:
        """Calls until the peer answers, at whichever of its addresses does."""
        while True:
            sock = yield from first([self._reach(peer, each) for each in sockets.several(addresses)], self._loop)
            if (stream := (yield from unless_turned_away(sock, self._introduce(sock, peer, number)))) is not None:
                return sock, stream

    def _introduce(self, sock: socket.socket, peer: int, number: int) -> Flow[Strand]:
        """The caller's side of `_answer`, after the handshake."""
        problem = (yield from prove_memory(sock)) if self._kind == sockets.LOCAL else ""
        # Only now does the peer count it as a stream, and says so; other addresses have not heard this word.
        yield from send(sock, bytes([number]))
        yield from receive(sock, 1)
        return Strand(peer, number, problem)

    def _reach(self, peer: int, address: str) -> Flow[socket.socket]:
        """A connection that has proven itself, at this address."""
        began = time.monotonic()
        while True:
            try:
                sock = yield from sockets.connect(address)
            except (ConnectionRefusedError, ConnectionResetError):
                if self._kind == sockets.LOCAL or time.monotonic() > began + STUBBORN_SECONDS:
                    raise
                yield from pause(RETRY_SECONDS)
                continue
            handshake = call(sock, self._secret, self._greeting(Role.CALLER, peer), Role.CALLEE)
            if (yield from unless_turned_away(sock, handshake)) is not None:
                return sock

    def _answer(self, sock: socket.socket) -> Flow[Strand]:
        me = self._greeting(Role.CALLEE, 0)
        proven = yield from answer(sock, self._secret, me, self._admit)
        problem = (yield from prove_memory(sock)) if self._kind == sockets.LOCAL else ""
        number = yield from receive(sock, 1)
        yield from send(sock, number)
        return Strand(proven.peer.rank, number[0], problem)

    def _starve(self, error: OSError) -> None:
        self.starved = error

    def _admit(self, peer: Greeting) -> bool:
        return peer.role is Role.CALLER and peer.rank in self.wanted and peer.rank not in self.made

    def _entered(self, sock: socket.socket, stream: Strand) -> None:
        self._settle(sock, stream)
