# The generations of an elastic job: rounds that begin, fail, run and lose members, and what the members are told.
# Pure: changes the state and returns messages; time is an argument. phases.py handles what happens inside a round.
"""`Generations(state)` is the part of the driver that knows which connection is which rank of which round."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from farandole.rendezvous.elastic import policy
from farandole.rendezvous.elastic.members import Drop, Status, Worker
from farandole.rendezvous.elastic.policy import Candidate, places_of
from farandole.rendezvous.elastic.state import JobState
from farandole.rendezvous.messages import Leave, LinkBroken, Lost, MembershipUpdate, Message, Retry
from farandole.rendezvous.phases import LINK_SECONDS, Phase, Round, RoundFailed, Sends

COMPLAINT_SECONDS = 0.3  # after the first broken link we wait this long for reports of others


class Generations:
    """See the module. A member is the number that the hub gave to a connection."""

    def __init__(self, state: JobState) -> None:
        self.newest = 0  # the number of the newest generation, whether it ran or not
        self._state = state
        self._rounds: list[Round] = []
        self._places: dict[int, tuple[Round, int]] = {}  # member -> its round and rank
        self._broken = False  # the running generation has lost a member
        self._complaints: list[tuple[int, int]] = []  # pairs of ranks without a link
        self._judge_at: float | None = None
        self._updates = 0  # how often members were told that others join or leave
        self._told: set[tuple[int, int]] = set()  # (worker, REMOVED or ADDED) of which the members know

    def begin(self, order: Sequence[Candidate]) -> Sends:
        """Begins a generation with these workers, in the order of their ranks."""
        state = self._state
        self.newest += 1
        one = Round(deadline=0.0)
        self._rounds.append(one)
        self._told.clear()
        self._complaints, self._judge_at = [], None
        for rank, candidate in enumerate(order):
            worker = state.workers[candidate.worker]
            assert worker.member is not None and worker.hello is not None
            worker.rank = rank
            worker.become(Status.MEMBER, state.now)
            one.members[rank] = worker.member
            one.hellos[rank] = worker.hello
            self._places[worker.member] = (one, rank)
        told = one.welcome(self.newest, state.now)
        places = places_of([(one.hello.host, one.local) for one in state.members if one.hello is not None])
        return [(one.members[rank], dataclasses.replace(told, place=places[rank])) for rank in range(len(order))]

    def message(self, member: int, message: Message) -> Sends | None:
        """Handles a message of a member. None when it changes nothing now, as one about a generation that is over."""
        place = self._places.get(member)
        if place is None or getattr(message, "generation", -1) != place[0].generation:
            return None
        one, rank = place
        if isinstance(message, Leave):
            del self._places[member]
            return self._leave(one, rank, message.again)
        if isinstance(message, LinkBroken):
            self._complain(one, rank, message)
            return None
        phase = one.phase
        try:
            sends = one.heard(rank, message)
        except RoundFailed as error:
            return self._end(one, str(error))
        if one.phase is Phase.RUNNING and phase is not Phase.RUNNING:
            self._runs(one)
        for text in one.warnings:
            self._state.say(text)
        one.warnings.clear()
        return sends

    def evict(self, worker: Worker, text: str) -> Sends:
        """Nobody waits for this worker any more. It may come again as a new member while its slot is free."""
        if worker.status in (Status.STARTING, Status.OUT, Status.LEFT, Status.ENDED):
            worker.member = None
            return []
        sends = self._remove(worker, text)
        if worker.member is not None:
            self._state.actions.append(Drop(worker.member))
        worker.member = None
        worker.become(Status.OUT, self._state.now)
        return sends

    def ended(self, worker: Worker, text: str) -> Sends:
        """The process of this worker has ended."""
        sends = self._remove(worker, text)
        worker.member = None
        worker.become(Status.ENDED, self._state.now)
        return sends

    def tick(self) -> Sends:
        """Ends the attempts whose time is up."""
        state = self._state
        sends: Sends = []
        for one in list(self._rounds):
            if one.phase is not Phase.RUNNING and one.deadline <= state.now:
                late = [rank for rank in one.members if rank not in one.done]
                for worker in [w for w in state.members if w.rank in late]:
                    worker.become(Status.OUT, state.now)  # it may come again by itself
                sends += self._end(one, f"ranks {late} did not finish {one.phase.value} within {LINK_SECONDS:g} s")
        if self._judge_at is not None and self._judge_at <= state.now:
            sends += self._judge()
        return sends

    def deadlines(self) -> list[float]:
        """The moments at which `tick` must be called."""
        due = [one.deadline for one in self._rounds if one.phase is not Phase.RUNNING]
        return due + ([self._judge_at] if self._judge_at is not None else [])

    def notify(self) -> Sends:
        """Tells the members of the running generation which workers want to join and which must leave."""
        state = self._state
        one = next((one for one in self._rounds if one.phase is Phase.RUNNING), None)
        members = state.members
        if one is None or self._broken or not members:
            return []
        news = {(w.number, policy.REMOVED) for w in members if w.leaving is not None}
        room = state.limits.most - len(members) + len(news)
        if not state.finishing and room > 0:
            # Members that have left it already come back by themselves.
            new = [c.worker for c in state.ready() if state.workers[c.worker].generation != one.generation]
            news |= {(number, policy.ADDED) for number in new}
        fresh = news - self._told
        if not fresh:
            return []
        self._told |= fresh
        self._updates += 1
        result = 0
        for _, kind in fresh:
            result |= kind
        saving = [w.leaving - state.now for w in members if w.must_save and w.leaving is not None]
        drain_ms = max(1, round(min(saving) * 1000)) if saving and result & policy.REMOVED else 0
        return one.tell(MembershipUpdate(one.generation, self._updates, result, drain_ms))

    def _runs(self, one: Round) -> None:
        """All links of a generation are made."""
        state = self._state
        state.runs += 1
        state.last = one.generation
        state.roster = {worker.rank: worker.number for worker in state.members}
        state.commit = one.hellos[0].commit
        self._broken = False
        for worker in state.members:
            worker.generation = one.generation
            worker.complaints = 0

    def _leave(self, one: Round, rank: int, again: int) -> Sends:
        worker = self._member(one, rank)
        worker.member = None
        worker.dismissed = again == 2
        # If a member was lost meanwhile, this worker may not have come to the step at which all save.
        worker.must_save = worker.must_save and self._broken and again == 1
        worker.become(Status.RETURNING if again in (1, 3) else Status.LEFT, self._state.now)
        sends = one.left(rank)
        if not one.members:
            self._rounds.remove(one)
        return sends

    def _member(self, one: Round, rank: int) -> Worker:
        return next(w for w in self._state.workers.values() if w.member == one.members[rank])

    def _complain(self, one: Round, rank: int, message: LinkBroken) -> None:
        if one.phase is not Phase.RUNNING and message.peer in one.members:
            self._complaints.append((min(rank, message.peer), max(rank, message.peer)))
            self._judge_at = self._judge_at or self._state.now + COMPLAINT_SECONDS

    def _judge(self) -> Sends:
        """Two ranks have no link though both reach the hub: one of them has to wait."""
        state = self._state
        complaints, self._complaints, self._judge_at = self._complaints, [], None
        one = next((one for one in self._rounds if one.phase is not Phase.RUNNING), None)
        if one is None or not complaints:
            return []
        rank = policy.loser(complaints)
        text = f"rank {rank} cannot be reached by others"
        if rank in one.members:
            worker = self._member(one, rank)
            worker.complaints += 1
            seconds = state.times.barred * 2.0 ** min(worker.complaints - 1, 6)
            worker.barred = state.now + seconds
            text = f"{state.name(worker)} cannot be reached by others: out for {seconds:g} s"
            state.say(text)
        return self._end(one, text)

    def _remove(self, worker: Worker, text: str) -> Sends:
        """Takes a lost worker out of its round and tells the other members at once."""
        if worker.member is None or worker.member not in self._places:
            return []
        one, rank = self._places.pop(worker.member)
        del one.members[rank]
        said = f"{self._state.name(worker)} was lost: {text}"
        if one.phase is not Phase.RUNNING:
            return self._end(one, said)
        self._broken = True
        sends = one.tell(Lost(one.generation, rank, said))
        if not one.members and one in self._rounds:
            self._rounds.remove(one)
        return sends

    def _end(self, one: Round, text: str) -> Sends:
        """This attempt has failed: all members join again. A generation that runs goes on."""
        if one.phase is Phase.RUNNING:
            return []
        sends = one.tell(Retry(text))
        for member in one.members.values():
            self._places.pop(member, None)
            for worker in self._state.workers.values():
                if worker.member == member:
                    worker.member = None
                    if worker.status is Status.MEMBER:
                        worker.become(Status.RETURNING, self._state.now)
        one.members.clear()
        if one in self._rounds:
            self._rounds.remove(one)
        self._complaints, self._judge_at = [], None
        return sends
