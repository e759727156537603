# The generations of an elastic job: rounds that begin, fail, run and lose members, and the messages to the members.
# Pure: changes the state and returns messages; time is an argument. phases.py handles what happens inside a round.
"""`Generations(state)` is the part of the driver that knows which connection is which rank of which round."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from farandole.rendezvous.elastic import policy
from farandole.rendezvous.elastic.members import Drop, Status, Worker
from farandole.rendezvous.elastic.policy import Candidate, numbers_of
from farandole.rendezvous.elastic.state import JobState
from farandole.rendezvous.messages import Leave, LinkBroken, Lost, MembershipUpdate, Message, Retry
from farandole.rendezvous.phases import LINK_SECONDS, Phase, Round, RoundFailed, Sends

BROKEN_LINK_WAIT_SECONDS = 0.3  # after the first report of a broken link, for the reports of other ranks


class Generations:
    """The rounds of an elastic job. `member` is the number of the connection on which a member talks to the hub."""

    def __init__(self, state: JobState) -> None:
        self.newest = 0  # the number of the newest generation, whether it ran or not
        self._state = state
        self._rounds: list[Round] = []
        self._ranks: dict[int, tuple[Round, int]] = {}  # member -> its round and rank
        self._broken = False  # the running generation has lost a member
        self._broken_links: list[tuple[int, int]] = []  # pairs of ranks without a link
        self._exclude_at: float | None = None
        self._updates = 0  # how many updates the members have got
        self._announced: set[tuple[int, int]] = set()  # (worker, REMOVED or ADDED) of which the members know

    def begin(self, order: Sequence[Candidate]) -> Sends:
        """Begins a generation with these workers, in the order of their ranks."""
        state = self._state
        self.newest += 1
        one = Round(deadline=0.0)
        self._rounds.append(one)
        self._announced.clear()
        self._broken_links, self._exclude_at = [], None
        for rank, candidate in enumerate(order):
            worker = state.workers[candidate.worker]
            assert worker.member is not None and worker.hello is not None
            worker.rank = rank
            worker.become(Status.MEMBER, state.now)
            one.members[rank] = worker.member
            one.hellos[rank] = worker.hello
            self._ranks[worker.member] = (one, rank)
        welcome = one.welcome(self.newest, state.now)
        numbers = numbers_of([(one.hello.host, one.local) for one in state.members if one.hello is not None])
        return [(one.members[rank], dataclasses.replace(welcome, numbers=numbers[rank])) for rank in range(len(order))]

    def message(self, member: int, message: Message) -> Sends | None:
        """Handles a message of a member. Returns None if nothing changes, for example if its generation has ended."""
        found = self._ranks.get(member)
        if found is None or getattr(message, "generation", -1) != found[0].generation:
            return None
        one, rank = found
        if isinstance(message, Leave):
            del self._ranks[member]
            return self._leave(one, rank, message.again)
        if isinstance(message, LinkBroken):
            self._add_broken_link(one, rank, message)
            return None
        phase = one.phase
        try:
            sends = one.handle_message(rank, message)
        except RoundFailed as error:
            return self._end(one, str(error))
        if one.phase is Phase.RUNNING and phase is not Phase.RUNNING:
            self._has_started(one)
        for text in one.warnings:
            self._state.say(text)
        one.warnings.clear()
        return sends

    def evict(self, worker: Worker, text: str) -> Sends:
        """No rank waits for this worker any more. It may join again as a new member while its slot is free."""
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
        """Ends the attempts whose deadline has passed."""
        state = self._state
        sends: Sends = []
        for one in list(self._rounds):
            if one.phase is not Phase.RUNNING and one.deadline <= state.now:
                late = [rank for rank in one.members if rank not in one.done]
                for worker in [w for w in state.members if w.rank in late]:
                    worker.become(Status.OUT, state.now)  # it may join again by itself
                sends += self._end(one, f"ranks {late} did not finish {one.phase.value} within {LINK_SECONDS:g} s")
        if self._exclude_at is not None and self._exclude_at <= state.now:
            sends += self._exclude_unreachable()
        return sends

    def deadlines(self) -> list[float]:
        """The moments at which `tick` must be called."""
        due = [one.deadline for one in self._rounds if one.phase is not Phase.RUNNING]
        return due + ([self._exclude_at] if self._exclude_at is not None else [])

    def notify(self) -> Sends:
        """Tells the members of the running generation which workers want to join and which must leave."""
        state = self._state
        one = next((one for one in self._rounds if one.phase is Phase.RUNNING), None)
        members = state.members
        if one is None or self._broken or not members:
            return []
        news = {(w.number, policy.REMOVED) for w in members if w.leaving is not None}
        free = state.limits.most - len(members) + len(news)
        if not state.finishing and free > 0:
            # Members that have left it already come back by themselves.
            new = [c.worker for c in state.ready() if state.workers[c.worker].generation != one.generation]
            news |= {(number, policy.ADDED) for number in new}
        unannounced = news - self._announced
        if not unannounced:
            return []
        self._announced |= unannounced
        self._updates += 1
        result = 0
        for _, kind in unannounced:
            result |= kind
        saving = [w.leaving - state.now for w in members if w.must_save and w.leaving is not None]
        drain_ms = max(1, round(min(saving) * 1000)) if saving and result & policy.REMOVED else 0
        return one.tell(MembershipUpdate(one.generation, self._updates, result, drain_ms))

    def _has_started(self, one: Round) -> None:
        """All links of a generation are made."""
        state = self._state
        state.runs += 1
        state.last = one.generation
        state.worker_of_rank = {worker.rank: worker.number for worker in state.members}
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

    def _add_broken_link(self, one: Round, rank: int, message: LinkBroken) -> None:
        if one.phase is not Phase.RUNNING and message.peer in one.members:
            self._broken_links.append((min(rank, message.peer), max(rank, message.peer)))
            self._exclude_at = self._exclude_at or self._state.now + BROKEN_LINK_WAIT_SECONDS

    def _exclude_unreachable(self) -> Sends:
        """Two ranks cannot connect although both reach the hub: one of them is excluded for some time."""
        state = self._state
        broken_links, self._broken_links, self._exclude_at = self._broken_links, [], None
        one = next((one for one in self._rounds if one.phase is not Phase.RUNNING), None)
        if one is None or not broken_links:
            return []
        rank = policy.loser(broken_links)
        text = f"rank {rank} cannot be reached by others"
        if rank in one.members:
            worker = self._member(one, rank)
            worker.complaints += 1
            seconds = state.times.excluded * 2.0 ** min(worker.complaints - 1, 6)
            worker.excluded_until = state.now + seconds
            text = f"{state.name(worker)} cannot be reached by others: out for {seconds:g} s"
            state.say(text)
        return self._end(one, text)

    def _remove(self, worker: Worker, text: str) -> Sends:
        """Takes a lost worker out of its round and tells the other members at once."""
        if worker.member is None or worker.member not in self._ranks:
            return []
        one, rank = self._ranks.pop(worker.member)
        del one.members[rank]
        reason = f"{self._state.name(worker)} was lost: {text}"
        if one.phase is not Phase.RUNNING:
            return self._end(one, reason)
        self._broken = True
        sends = one.tell(Lost(one.generation, rank, reason))
        if not one.members and one in self._rounds:
            self._rounds.remove(one)
        return sends

    def _end(self, one: Round, text: str) -> Sends:
        """This attempt has failed: all members join again. A running generation is not changed."""
        if one.phase is Phase.RUNNING:
            return []
        sends = one.tell(Retry(text))
        for member in one.members.values():
            self._ranks.pop(member, None)
            for worker in self._state.workers.values():
                if worker.member == member:
                    worker.member = None
                    if worker.status is Status.MEMBER:
                        worker.become(Status.RETURNING, self._state.now)
        one.members.clear()
        if one in self._rounds:
            self._rounds.remove(one)
        self._broken_links, self._exclude_at = [], None
        return sends
