# One round: the phases from the first Hello to the links, then link requests and wait reports while it runs.
# Pure: no sockets; time is an argument. rounds.py and elastic/generations.py decide who is in a round.
"""A round goes gathering -> trying shared memory (inside hosts) -> linking -> running.

Methods return the messages to send: a list of (member, message). `RoundFailed` says why the attempt cannot go on; the
owner of the round tells its members.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from farandole.rendezvous.messages import (
    Failed,
    Hello,
    HostsAgreed,
    Linked,
    LinkRefused,
    LinkRequest,
    ListenAddress,
    ListenRequest,
    MemoryProved,
    Message,
    Started,
    WaitReport,
    Welcome,
)
from farandole.rendezvous.slow_links import SlowLinks
from farandole.rendezvous.stragglers import Stragglers

LINK_SECONDS = 30.0  # how long a complete round has to make its links
MAX_TEXT = 1024  # characters of a host name or an address
Sends = list[tuple[int, Message]]


class Phase(Enum):
    """Where a round is."""

    GATHERING = "waiting for ranks"
    TRYING_SHARED_MEMORY = "trying shared memory"
    LINKING = "making links"
    RUNNING = "running"


class RoundFailed(Exception):
    """A round cannot continue; the text says why."""


@dataclass
class Round:
    """One attempt of all ranks to join. After it succeeds, the object lives until the last of its ranks leaves."""

    deadline: float
    phase: Phase = Phase.GATHERING
    generation: int = 0
    members: dict[int, int] = field(default_factory=dict)  # rank -> number of its connection to the hub
    hellos: dict[int, Hello] = field(default_factory=dict)
    hosts: list[int] = field(default_factory=list)
    done: set[int] = field(default_factory=set)  # ranks that have finished the current phase
    reasons: list[str] = field(default_factory=list)
    hosts_without_shared_memory: set[int] = field(default_factory=set)
    link_requests: set[tuple[int, int]] = field(default_factory=set)
    timeout: float = 0.0  # seconds that the ranks wait for each other: the shortest start timeout among them
    stragglers: Stragglers | None = None
    slow_links: SlowLinks | None = None
    warnings: list[str] = field(default_factory=list)  # for the user

    def tell(self, message: Message, ranks: Iterable[int] | None = None) -> Sends:
        """The message for these ranks, or for all members."""
        chosen = self.members if ranks is None else ranks
        return [(self.members[rank], message) for rank in chosen if rank in self.members]

    def welcome(self, generation: int, now: float) -> Welcome:
        """All members are known: numbers their hosts and starts the trial of shared memory. Returns their message."""
        self.generation = generation
        self.phase = Phase.TRYING_SHARED_MEMORY
        self.deadline = now + LINK_SECONDS
        hellos = [self.hellos[rank] for rank in range(len(self.hellos))]
        self.hosts = number_in_order([hello.host if hello.sharing else rank for rank, hello in enumerate(hellos)])
        return Welcome(
            generation,
            tuple(self.hosts),
            tuple(hello.host for hello in hellos),
            tuple(hello.local for hello in hellos),
            tuple(hello.remote for hello in hellos),
            hellos[0].streams,
        )

    def handle_message(self, rank: int, message: Message) -> Sends:
        """Handles a message of a member. Raises RoundFailed when the round cannot continue."""
        if isinstance(message, Failed):
            raise RoundFailed(message.text[:MAX_TEXT])
        if isinstance(message, MemoryProved) and self.phase is Phase.TRYING_SHARED_MEMORY:
            return self._proved(rank, message)
        if isinstance(message, MemoryProved) and self.phase is Phase.LINKING:
            return []  # another rank of its host has already reported that shared memory fails there
        if isinstance(message, Linked) and self.phase is Phase.LINKING:
            return self._linked(rank)
        if isinstance(message, LinkRequest):
            return self._link_request(rank, message.peer)
        if isinstance(message, ListenAddress):
            return self._offer(rank, message)
        if isinstance(message, WaitReport):
            return self._waited(rank, message)
        raise RoundFailed(f"rank {rank} sent a {type(message).__name__} while {self.phase.value}")

    def left(self, rank: int) -> Sends:
        """A rank has left: no rank gets a link to it any more. Raises RoundFailed if the round does not run yet."""
        del self.members[rank]
        if self.phase is not Phase.RUNNING:
            raise RoundFailed(f"rank {rank} left while the job was {self.phase.value}")
        sends: Sends = []
        for pair in [pair for pair in self.link_requests if rank in pair]:
            self.link_requests.discard(pair)
            other = pair[0] if pair[1] == rank else pair[1]
            sends += self.tell(LinkRefused(self.generation, rank, f"rank {rank} has left"), [other])
        return sends

    def _proved(self, rank: int, message: MemoryProved) -> Sends:
        self.done.add(rank)
        if message.unshared:
            # The other ranks of this host may wait for a connection that never comes, so they count as done too.
            self.hosts_without_shared_memory.add(self.hosts[rank])
            self.reasons.append(message.reason[:MAX_TEXT])
        waiting = [
            other
            for other in self.members
            if other not in self.done and self.hosts[other] not in self.hosts_without_shared_memory
        ]
        if waiting:
            return []
        entries: list[object] = [
            ("rank", index) if host in self.hosts_without_shared_memory else ("host", host)
            for index, host in enumerate(self.hosts)
        ]
        self.hosts = number_in_order(entries)
        self.phase = Phase.LINKING
        self.done.clear()
        return self.tell(HostsAgreed(self.generation, tuple(self.hosts), "; ".join(self.reasons)))

    def _linked(self, rank: int) -> Sends:
        self.done.add(rank)
        if set(self.members) - self.done:
            return []
        self.phase = Phase.RUNNING
        return self.tell(Started(self.generation))

    def _link_request(self, rank: int, peer: int) -> Sends:
        if peer not in self.members or peer == rank:
            return self.tell(LinkRefused(self.generation, peer, f"rank {peer} has left or was lost"), [rank])
        pair = (min(rank, peer), max(rank, peer))
        if pair in self.link_requests:
            return []  # the other side has already asked for this link
        self.link_requests.add(pair)
        return self.tell(ListenRequest(self.generation, pair[0]), [pair[1]])

    def _offer(self, rank: int, offer: ListenAddress) -> Sends:
        pair = (offer.peer, rank)
        if pair not in self.link_requests:
            return []
        if not offer.address:
            self.link_requests.discard(pair)
            return self.tell(LinkRefused(self.generation, rank, f"rank {rank} cannot listen"), [offer.peer])
        return self.tell(ListenAddress(self.generation, rank, offer.address), [offer.peer])

    def _waited(self, rank: int, message: WaitReport) -> Sends:
        if self.phase is Phase.RUNNING and len(self.hellos) == len(self.hosts) > 1:
            if self.stragglers is None or self.slow_links is None:
                hosts = [self.hellos[each].host for each in sorted(self.hellos)]
                self.stragglers = Stragglers([f"rank {each} on {host}" for each, host in enumerate(hosts)])
                self.slow_links = SlowLinks(hosts)
            slow_rank = self.stragglers.add_report(rank, message.waited_ms / max(1, message.of_ms))
            slow_link = self.slow_links.add_report(rank, message.of_ms, message.links)
            self.warnings += [text for text in (slow_rank, slow_link) if text is not None]
        return []


def package_mismatch(who: str, hello: Hello, package: str) -> str:
    """Why this process cannot be in a job of a launcher with this version of the package; an empty text if it can."""
    if max(map(len, (hello.host, hello.package, hello.local, hello.remote, hello.wire))) > MAX_TEXT:
        return f"{who} has a host name or an address above the limit of {MAX_TEXT} characters"
    if hello.package != package:
        return (
            f"{who} on {hello.host} has farandole {hello.package}, the launcher {package}: "
            "install the same version on every host"
        )
    return ""


def protocol_mismatch(who: str, hello: Hello, whose: str, other: Hello) -> str:
    """Why two ranks cannot be in one job."""
    return (
        f"{who} on {hello.host} has another build of the core (protocol {hello.wire}) than {whose} on {other.host} "
        f"(protocol {other.wire}): install the same build of farandole on every host"
    )


def number_in_order(entries: Iterable[object]) -> list[int]:
    """Numbers entries in the order of their first appearance."""
    numbers: dict[object, int] = {}
    return [numbers.setdefault(entry, len(numbers)) for entry in entries]
