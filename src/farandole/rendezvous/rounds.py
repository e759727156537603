# What the hub decides: who is in a round, when it is complete, which generation it gets, what each rank is told.
# Pure: no sockets; time is an argument.
"""Each `init` of a rank joins the round that is gathering; a full round gets the next generation.

A round goes gathering -> proving (shared memory inside hosts) -> linking -> running. A rank may enter the next round
while others are still running in an older one. Every method returns the messages to send: a list of (member, message).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from farandole.rendezvous.messages import (
    Failed,
    Hello,
    HostsAgreed,
    Leave,
    Linked,
    LinkRefused,
    LinkRequest,
    ListenAddress,
    ListenRequest,
    Lost,
    MemoryProved,
    Message,
    Rejected,
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
    PROVING = "trying shared memory"
    LINKING = "making links"
    RUNNING = "running"


@dataclass
class Round:
    """One membership, from the first rank that asks for it to the last that leaves."""

    deadline: float
    phase: Phase = Phase.GATHERING
    generation: int = 0
    members: dict[int, int] = field(default_factory=dict)  # rank -> member
    hellos: dict[int, Hello] = field(default_factory=dict)
    hosts: list[int] = field(default_factory=list)
    done: set[int] = field(default_factory=set)  # ranks that have finished the current phase
    reasons: list[str] = field(default_factory=list)
    divided: set[int] = field(default_factory=set)  # numbers of hosts without shared memory
    link_requests: set[tuple[int, int]] = field(default_factory=set)
    timeout: float = 0.0
    stragglers: Stragglers | None = None
    slow_links: SlowLinks | None = None

    def tell(self, message: Message, ranks: Iterable[int] | None = None) -> Sends:
        """The message for these ranks, or for all members."""
        chosen = self.members if ranks is None else ranks
        return [(self.members[rank], message) for rank in chosen if rank in self.members]


def different_wires(who: str, hello: Hello, whose: str, other: Hello) -> str:
    """Why two ranks cannot be in one job."""
    return (
        f"{who} on {hello.host} has another build of the core (wire {hello.wire}) than {whose} on {other.host} "
        f"(wire {other.wire}): install the same build of farandole on every host"
    )


class Rounds:
    """All rounds of a job. Members are numbers that the hub gives to connections."""

    def __init__(self, size: int, package: str) -> None:
        self.size = size
        self.package = package
        self.generation = 0
        self._gathering: Round | None = None
        self._rounds: list[Round] = []
        self._places: dict[int, tuple[Round, int]] = {}  # member -> its round and rank
        self._rejection: tuple[str, set[int]] = ("", set())  # a reason, and the ranks that have been told it
        self.warnings: list[str] = []  # for the user; the hub prints them
        self._absent: dict[int, str] = {}  # ranks whose process has ended, and how

    def complete(self) -> bool:
        """Whether all ranks run together, so that no other rank can join."""
        return any(one.phase is Phase.RUNNING and len(one.members) == self.size for one in self._rounds)

    def deadline(self) -> float | None:
        """The next moment at which `tick` must be called."""
        return min((one.deadline for one in self._rounds if one.phase is not Phase.RUNNING), default=None)

    def tick(self, now: float) -> Sends:
        """Ends the rounds whose deadline has passed."""
        sends: Sends = []
        for one in list(self._rounds):
            if one.phase is Phase.RUNNING or one.deadline > now:
                continue
            if one.phase is Phase.GATHERING:
                missing = sorted(set(range(self.size)) - set(one.members))
                text = (
                    f"{len(one.members)} of {self.size} ranks came to init within {one.timeout:g} s; missing: "
                    f"{_list(missing)}. If they are only slow, raise FARANDOLE_START_TIMEOUT (HOROVOD_START_TIMEOUT)."
                )
            else:
                text = (
                    f"{_list(sorted(set(one.members) - one.done))} did not finish {one.phase.value} "
                    f"within {LINK_SECONDS:g} s"
                )
            sends += self._end(one, text)
        return sends

    def message(self, member: int, message: Message, now: float) -> Sends:
        """Handles a message of a member."""
        if isinstance(message, Hello):
            return self._hello(member, message, now)
        place = self._places.get(member)
        if place is None:
            return []  # its round has ended; a message about it is on the way
        one, rank = place
        if getattr(message, "generation", -1) != one.generation:
            return self._end(one, f"rank {rank} sent a message for another generation than {one.generation}")
        if isinstance(message, Failed):
            return self._end(one, message.text[:MAX_TEXT])
        if isinstance(message, MemoryProved) and one.phase is Phase.PROVING:
            return self._proved(one, rank, message)
        if isinstance(message, MemoryProved) and one.phase is Phase.LINKING:
            return []  # its host was divided before this rank had finished
        if isinstance(message, Linked) and one.phase is Phase.LINKING:
            return self._linked(one, rank)
        if isinstance(message, Leave):
            self._places.pop(member, None)
            return self._left(one, rank)
        if isinstance(message, LinkRequest):
            return self._link_request(one, rank, message.peer)
        if isinstance(message, ListenAddress):
            return self._offer(one, rank, message)
        if isinstance(message, WaitReport):
            return self._waited(one, rank, message)
        return self._end(one, f"rank {rank} sent a {type(message).__name__} while {one.phase.value}")

    def gone(self, member: int, reason: str, now: float = 0.0) -> Sends:
        """Handles the end of a member's connection."""
        place = self._places.pop(member, None)
        if place is None:
            return []
        one, rank = place
        hello = one.hellos[rank]
        text = f"rank {rank} (process {hello.pid} on {hello.host}) died"
        del one.members[rank]
        if one.phase is Phase.RUNNING:
            sends = one.tell(Lost(one.generation, rank, f"{text} ({reason})"))
            if not one.members:
                self._rounds.remove(one)
            return sends
        return self._end(one, f"{text} while the job was {one.phase.value} ({reason})")

    def absent(self, rank: int, reason: str) -> Sends:
        """The launcher reports that the process of this rank has ended, so it will not join."""
        self._absent[rank] = reason
        one = self._gathering
        if one is None or rank in one.members:
            return []
        return self._end(one, _cannot_complete(rank, reason))

    def _hello(self, member: int, hello: Hello, now: float) -> Sends:
        if member in self._places:
            return [(member, Rejected("this connection has already sent a Hello"))]
        if self._gathering is None:
            self._gathering = Round(deadline=float("inf"))
            self._rounds.append(self._gathering)
        one = self._gathering
        wrong = self._objection(one, hello)
        if wrong:
            self._rejection = (wrong, {hello.rank, *one.members})
            return [(member, Rejected(wrong)), *self._end(one, wrong)]
        text, told = self._rejection
        if text and hello.rank not in told:
            # It comes after those that were told, and would wait for them forever.
            told.add(hello.rank)
            return [(member, Rejected(text)), *self._end(one, text)]
        self._rejection = ("", set())  # a rank that comes again wants a new round
        self._places[member] = (one, hello.rank)
        one.members[hello.rank] = member
        one.hellos[hello.rank] = hello
        if now + hello.timeout_ms / 1000 < one.deadline:
            one.deadline = now + hello.timeout_ms / 1000
            one.timeout = hello.timeout_ms / 1000
        return self._welcome(one, now) if len(one.members) == self.size else []

    def _objection(self, one: Round, hello: Hello) -> str:
        if max(map(len, (hello.host, hello.package, hello.local, hello.remote, hello.wire))) > MAX_TEXT:
            return f"rank {hello.rank} has a host name or an address above the limit of {MAX_TEXT} characters"
        if hello.package != self.package:
            return (
                f"rank {hello.rank} on {hello.host} has farandole {hello.package}, the launcher {self.package}: "
                "install the same version on every host"
            )
        if other := next((other for other in one.hellos.values() if other.wire != hello.wire), None):
            return different_wires(f"rank {hello.rank}", hello, f"rank {other.rank}", other)
        if hello.size != self.size:
            return f"rank {hello.rank} was told a size of {hello.size}, but the job has {self.size} ranks"
        if not 0 <= hello.rank < self.size:
            return f"there is no rank {hello.rank} in a job of {self.size}"
        if hello.rank in one.members:
            first = one.hellos[hello.rank]
            return (
                f"two processes say that they are rank {hello.rank}: {first.pid} on {first.host} and "
                f"{hello.pid} on {hello.host}"
            )
        for rank, reason in self._absent.items():
            return _cannot_complete(rank, reason)
        return ""

    def _welcome(self, one: Round, now: float) -> Sends:
        self._gathering = None
        self.generation += 1
        one.generation = self.generation
        one.phase = Phase.PROVING
        one.deadline = now + LINK_SECONDS
        return one.tell(welcome(one, [one.hellos[rank] for rank in range(self.size)]))

    def _proved(self, one: Round, rank: int, message: MemoryProved) -> Sends:
        one.done.add(rank)
        if message.unshared:
            # The other ranks of this host may wait for a connection that never comes, so they count as done too.
            one.divided.add(one.hosts[rank])
            one.reasons.append(message.reason[:MAX_TEXT])
        waiting = [other for other in one.members if other not in one.done and one.hosts[other] not in one.divided]
        if waiting:
            return []
        entries: list[object] = [
            ("rank", index) if host in one.divided else ("host", host) for index, host in enumerate(one.hosts)
        ]
        one.hosts = number_in_order(entries)
        one.phase = Phase.LINKING
        one.done.clear()
        return one.tell(HostsAgreed(one.generation, tuple(one.hosts), "; ".join(one.reasons)))

    def _linked(self, one: Round, rank: int) -> Sends:
        one.done.add(rank)
        if set(one.members) - one.done:
            return []
        one.phase = Phase.RUNNING
        return one.tell(Started(one.generation))

    def _left(self, one: Round, rank: int) -> Sends:
        del one.members[rank]
        if one.phase is not Phase.RUNNING:
            return self._end(one, f"rank {rank} left while the job was {one.phase.value}")
        sends: Sends = []
        for pair in [pair for pair in one.link_requests if rank in pair]:
            one.link_requests.discard(pair)
            other = pair[0] if pair[1] == rank else pair[1]
            sends += one.tell(LinkRefused(one.generation, rank, f"rank {rank} has left"), [other])
        if not one.members:
            self._rounds.remove(one)
        return sends

    def _link_request(self, one: Round, rank: int, peer: int) -> Sends:
        if peer not in one.members or peer == rank:
            return one.tell(LinkRefused(one.generation, peer, f"rank {peer} has left or was lost"), [rank])
        pair = (min(rank, peer), max(rank, peer))
        if pair in one.link_requests:
            return []  # the other side has already asked for this link
        one.link_requests.add(pair)
        return one.tell(ListenRequest(one.generation, pair[0]), [pair[1]])

    def _offer(self, one: Round, rank: int, offer: ListenAddress) -> Sends:
        pair = (offer.peer, rank)
        if pair not in one.link_requests:
            return []
        if not offer.address:
            one.link_requests.discard(pair)
            return one.tell(LinkRefused(one.generation, rank, f"rank {rank} cannot listen"), [offer.peer])
        return one.tell(ListenAddress(one.generation, rank, offer.address), [offer.peer])

    def _waited(self, one: Round, rank: int, message: WaitReport) -> Sends:
        if one.phase is Phase.RUNNING and len(one.hellos) == len(one.hosts) > 1:
            if one.stragglers is None or one.slow_links is None:
                hosts = [one.hellos[each].host for each in sorted(one.hellos)]
                one.stragglers = Stragglers([f"rank {each} on {host}" for each, host in enumerate(hosts)])
                one.slow_links = SlowLinks(hosts)
            named = one.stragglers.heard(rank, message.waited_ms / max(1, message.of_ms))
            slow = one.slow_links.heard(rank, message.of_ms, message.links)
            self.warnings += [text for text in (named, slow) if text is not None]
        return []

    def _end(self, one: Round, text: str) -> Sends:
        sends = one.tell(Rejected(text))
        for member in one.members.values():
            self._places.pop(member, None)
        one.members.clear()
        if one in self._rounds:
            self._rounds.remove(one)
        if one is self._gathering:
            self._gathering = None
        return sends


def welcome(one: Round, hellos: list[Hello]) -> Welcome:
    """What a round tells its members, by what each has said, in the order of their ranks; numbers their hosts."""
    one.hosts = number_in_order([hello.host if hello.sharing else rank for rank, hello in enumerate(hellos)])
    return Welcome(
        one.generation,
        tuple(one.hosts),
        tuple(hello.host for hello in hellos),
        tuple(hello.local for hello in hellos),
        tuple(hello.remote for hello in hellos),
        hellos[0].streams,
    )


def number_in_order(entries: Iterable[object]) -> list[int]:
    """Numbers entries in the order of their first appearance."""
    numbers: dict[object, int] = {}
    return [numbers.setdefault(entry, len(numbers)) for entry in entries]


def _cannot_complete(rank: int, reason: str) -> str:
    return f"rank {rank} {reason}; the others would wait for it forever"


def _list(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:32])) + (f" and {len(ranks) - 32} more" if len(ranks) > 32 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
