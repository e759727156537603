# What the hub decides: who is in a round, when it is complete, which generation it gets, which messages the ranks get.
# Pure: no sockets; time is an argument. phases.py handles what happens inside a round.
"""Each `init` of a rank joins the round that is gathering; a full round gets the next generation.

A rank may enter the next round while others are still running in an older one. Every method returns the messages to
send: a list of (member, message).
"""

from __future__ import annotations

from farandole.rendezvous.messages import Hello, Leave, Lost, Message, Rejected
from farandole.rendezvous.phases import (
    LINK_SECONDS,
    Phase,
    Round,
    RoundFailed,
    Sends,
    package_mismatch,
    protocol_mismatch,
)


class Rounds:
    """All rounds of a job. `member` is the number of the connection on which a member talks to the hub."""

    def __init__(self, size: int, package: str) -> None:
        self.size = size
        self.package = package
        self.generation = 0
        self._gathering: Round | None = None
        self._rounds: list[Round] = []
        self._ranks: dict[int, tuple[Round, int]] = {}  # connection -> its round and rank
        self._rejection: tuple[str, set[int]] = ("", set())  # a reason, and the ranks that have been told it
        self._ended: dict[int, str] = {}  # ranks whose process has ended, and how

    def complete(self) -> bool:
        """Whether all ranks run together, so that no other rank can join."""
        return any(one.phase is Phase.RUNNING and len(one.members) == self.size for one in self._rounds)

    def take_warnings(self) -> list[str]:
        """Warnings for the user, each once."""
        found = [text for one in self._rounds for text in one.warnings]
        for one in self._rounds:
            one.warnings.clear()
        return found

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
                    f"{len(one.members)} of {self.size} ranks called init within {one.timeout:g} s; missing: "
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
        found = self._ranks.get(member)
        if found is None:
            return []  # its round has ended; a message about it is on the way
        one, rank = found
        if getattr(message, "generation", -1) != one.generation:
            return self._end(one, f"rank {rank} sent a message for another generation than {one.generation}")
        try:
            if not isinstance(message, Leave):
                return one.handle_message(rank, message)
            self._ranks.pop(member, None)
            sends = one.left(rank)
        except RoundFailed as error:
            return self._end(one, str(error))
        if not one.members:
            self._rounds.remove(one)
        return sends

    def connection_lost(self, member: int, reason: str, now: float = 0.0) -> Sends:
        """Handles the end of a member's connection."""
        found = self._ranks.pop(member, None)
        if found is None:
            return []
        one, rank = found
        hello = one.hellos[rank]
        text = f"rank {rank} (process {hello.pid} on {hello.host}) died"
        del one.members[rank]
        if one.phase is Phase.RUNNING:
            sends = one.tell(Lost(one.generation, rank, f"{text} ({reason})"))
            if not one.members:
                self._rounds.remove(one)
            return sends
        return self._end(one, f"{text} while the job was {one.phase.value} ({reason})")

    def process_ended(self, rank: int, reason: str) -> Sends:
        """The launcher reports that the process of this rank has ended, so it will not join."""
        self._ended[rank] = reason
        one = self._gathering
        if one is None or rank in one.members:
            return []
        return self._end(one, _cannot_complete(rank, reason))

    def _hello(self, member: int, hello: Hello, now: float) -> Sends:
        if member in self._ranks:
            return [(member, Rejected("this connection has already sent a Hello"))]
        if self._gathering is None:
            self._gathering = Round(deadline=float("inf"))
            self._rounds.append(self._gathering)
        one = self._gathering
        wrong = self._refusal(one, hello)
        if wrong:
            self._rejection = (wrong, {hello.rank, *one.members})
            return [(member, Rejected(wrong)), *self._end(one, wrong)]
        text, informed = self._rejection
        if text and hello.rank not in informed:
            # It comes after the others were rejected, and would wait for them forever.
            informed.add(hello.rank)
            return [(member, Rejected(text)), *self._end(one, text)]
        self._rejection = ("", set())  # a rank that joins again wants a new round
        self._ranks[member] = (one, hello.rank)
        one.members[hello.rank] = member
        one.hellos[hello.rank] = hello
        if now + hello.timeout_ms / 1000 < one.deadline:
            one.deadline = now + hello.timeout_ms / 1000
            one.timeout = hello.timeout_ms / 1000
        return self._welcome(one, now) if len(one.members) == self.size else []

    def _refusal(self, one: Round, hello: Hello) -> str:
        if wrong := package_mismatch(f"rank {hello.rank}", hello, self.package):
            return wrong
        if other := next((other for other in one.hellos.values() if other.wire != hello.wire), None):
            return protocol_mismatch(f"rank {hello.rank}", hello, f"rank {other.rank}", other)
        if hello.size != self.size:
            return f"rank {hello.rank} has a size of {hello.size}, but the job has {self.size} ranks"
        if not 0 <= hello.rank < self.size:
            return f"there is no rank {hello.rank} in a job of {self.size}"
        if hello.rank in one.members:
            first = one.hellos[hello.rank]
            return (
                f"two processes say that they are rank {hello.rank}: {first.pid} on {first.host} and "
                f"{hello.pid} on {hello.host}"
            )
        for rank, reason in self._ended.items():
            return _cannot_complete(rank, reason)
        return ""

    def _welcome(self, one: Round, now: float) -> Sends:
        self._gathering = None
        self.generation += 1
        return one.tell(one.welcome(self.generation, now))

    def _end(self, one: Round, text: str) -> Sends:
        sends = one.tell(Rejected(text))
        for member in one.members.values():
            self._ranks.pop(member, None)
        one.members.clear()
        if one in self._rounds:
            self._rounds.remove(one)
        if one is self._gathering:
            self._gathering = None
        return sends


def _cannot_complete(rank: int, reason: str) -> str:
    return f"rank {rank} {reason}; the others would wait for it forever"


def _list(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:32])) + (f" and {len(ranks) - 32} more" if len(ranks) > 32 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
