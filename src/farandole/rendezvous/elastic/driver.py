# The driver of an elastic job: who is in, who is waited for, who may come; the only issuer of generations.
# Pure: no sockets, no processes; time is an argument. Uses places.py, members.py, policy.py and rounds.py.
"""`ElasticDriver` is `Rounds` whose members come and go.

What ranks say comes in through `message` and `gone`, what the launcher knows through `hosts_found`, `ended`, `silent`
and the like. Each returns the messages to send; what the launcher shall do is collected in `acts` (see `take_acts`).
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence

import farandole.rendezvous.elastic.policy as policy
from farandole.rendezvous.elastic.members import Act, Drop, Host, Kill, Life, Over, Say, Slot, Worker
from farandole.rendezvous.elastic.places import Places, places_of
from farandole.rendezvous.elastic.policy import Candidate, Limits, Times
from farandole.rendezvous.messages import (
    Hello,
    Leave,
    LinkBroken,
    Lost,
    MembershipUpdate,
    Message,
    Rejected,
    Removed,
    Retry,
)
from farandole.rendezvous.rounds import (
    LINK_SECONDS,
    MAX_TEXT,
    Phase,
    Round,
    Sends,
    different_wires,
    welcome,
)

FIRST_SECONDS = 2.0  # -np ranks have come: so long the first generation waits for those that are just starting
RETURN_SECONDS = 10.0  # between leaving one generation and asking for the next
PARTING_SECONDS = 2.0  # between the end of a worker's connection and that of its process
COMPLAINT_SECONDS = 0.3  # for others to complain as well
ALL_LEFT_OUT = (
    "every host has been left out, because a rank failed on each (--blacklist host; with --blacklist slot, or with "
    "--blacklist-cooldown-range, ranks are started there again)"
)
LEFT_SECONDS = 2.0  # who leaves in good order may come again; so long the next generation waits for it


class ElasticDriver(Places):
    """See the module. `draw` gives the random part of cool-downs."""

    def __init__(
        self, limits: Limits, package: str, times: Times | None = None, draw: random.Random | None = None
    ) -> None:
        super().__init__(limits, package, times)
        self.over: Over | None = None
        self.drained = False  # a host has asked to be left alone
        self.roster: dict[int, int] = {}  # the ranks of the last generation that has run, and their workers
        self._draw = draw or random.Random()
        self._suspects: set[int] = set()  # workers that are silent
        self._stamp = 0
        self._told: set[tuple[int, int]] = set()  # (worker, REMOVED or ADDED) of which members know
        self._broken = False  # the running generation has lost somebody
        self._complaints: list[tuple[int, int]] = []
        self._judge_at: float | None = None
        self._enough_since: float | None = None
        self._below_since: float | None = None
        self._failures: Counter[str] = Counter()  # of ranks, by host
        self._early = ""  # somebody ended well before the first generation began

    def take_acts(self) -> list[Act]:
        """What the launcher shall do, in order; each once."""
        acts, self.acts = self.acts, []
        return acts

    def complete(self) -> bool:
        """Never: somebody may come at any time."""
        return False

    # What the launcher knows.

    def hosts_found(self, found: Sequence[tuple[str, int]], now: float) -> Sends:
        """Discovery names these hosts and slots."""
        self._now = now
        slots = dict(found)
        for name, count in slots.items():
            host = self.hosts.setdefault(name, Host(name, count))
            if not host.listed:
                host.drained = False  # it was away, and comes back as a new one
            host.listed, host.slots = True, count
        for host in self.hosts.values():
            if host.name not in slots:
                host.listed = False
        return self._go_on()

    def host_lost(self, name: str, text: str, now: float) -> Sends:
        """An agent is gone, and all its processes with it."""
        self._now = now
        sends: Sends = []
        host = self.hosts[name]
        host.up = False
        lost = [one for one in self.workers.values() if one.host == name and one.life is not Life.GONE]
        for worker in lost:
            sends += self._bury(worker, text)
            worker.dismissed = True
        for place in host.places:
            place.worker = None
        return sends + self._go_on()

    def host_silent(self, name: str, now: float) -> Sends:
        """No word from a host for the time of eviction."""
        self._now = now
        host = self.hosts[name]
        if not host.up:
            return []
        host.up = False
        self.acts.append(Say(f"{name} has been silent for {self.times.evict:g} s: its ranks are out until it is back"))
        sends: Sends = []
        for worker in self.workers.values():
            if worker.host == name:
                sends += self._evict(worker, f"{name} is silent")
        return sends + self._go_on()

    def host_up(self, name: str, now: float) -> Sends:
        """A host can be reached, for the first time or again."""
        self._now = now
        self.hosts[name].up = True
        return self._go_on()

    def drain(self, name: str, seconds: float, now: float) -> Sends:
        """A host has to go within so many seconds."""
        self._now = now
        self.hosts[name].drained = True
        self.drained = True
        for worker in self.workers.values():
            if worker.host == name and worker.leaving is None and worker.life is not Life.STARTING:
                worker.leaving = now + seconds
                worker.owes = worker.generation > 0
        return self._go_on()

    def quiet(self, number: int, seconds: float, state: str, now: float) -> Sends:
        """An agent says how long a worker has been silent, and the kernel's letter for its process; 0: it is not."""
        self._now = now
        worker = self.workers.get(number)
        if worker is None or worker.life in (Life.OUT, Life.GONE) or not seconds:
            self._suspects.discard(number)
            return []
        text = f"has shown no sign of life for {seconds:.1f} s ({policy.STATES.get(state, 'it does not run')})"
        if number not in self._suspects:
            self._suspects.add(number)
            self.acts.append(Say(f"{self.name(worker)} {text}"))
        members = [one.number for one in self.members]
        most = policy.most_fell_silent(len(self._suspects.intersection(members)), len(members))
        if seconds < self.times.evict or (seconds < self.times.stubborn and (most or state == "D")):
            return []
        self._suspects.discard(number)
        return self.silent(number, text, now)

    def silent(self, number: int, text: str, now: float) -> Sends:
        """A worker has shown no sign of life for the time of eviction."""
        self._now = now
        worker = self.workers.get(number)
        if worker is None or worker.life in (Life.STARTING, Life.OUT, Life.GONE):
            return []
        self.acts.append(Say(f"{self.name(worker)} {text}: evicted"))
        return self._evict(worker, text) + self._go_on()

    def ended(self, number: int, code: int, text: str, now: float) -> Sends:
        """A worker's process has ended."""
        self._now = now
        worker = self.workers.get(number)
        if worker is None or worker.life is Life.GONE:
            return []
        slot = self._slot(worker)
        mine = slot is not None and slot.worker == number
        # One that was cut off or evicted did not end because the training did; one that just ended was never away long.
        was_out = worker.life is Life.OUT and now > worker.changed + PARTING_SECONDS
        sends = self._bury(worker, text)
        if slot is not None and mine:
            slot.worker = None
        if worker.dismissed or worker.leaving is not None or (code == 0 and was_out):
            return sends + self._go_on()
        if code == 0 and worker.generation:
            self.finishing = True
        elif code == 0 and not self.runs:
            self._early = f"{self.name(worker)} ended with exit code 0 before the ranks had met"
            if slot is not None and mine:
                slot.not_before = float("inf")  # it would do the same again
        else:
            self._failed(worker, slot if mine else None, policy.killed_from_outside(code, text))
        return sends + self._go_on()

    def tick(self, now: float) -> Sends:
        """Time has passed."""
        self._now = now
        sends: Sends = []
        for one in list(self._rounds):
            if one.phase is not Phase.RUNNING and one.deadline <= now:
                late = [rank for rank in one.members if rank not in one.done]
                for worker in [w for w in self.members if w.rank in late]:
                    worker.become(Life.OUT, now)  # it may come again by itself
                sends += self._end(one, f"ranks {late} did not finish {one.phase.value} within {LINK_SECONDS:g} s")
        if self._judge_at is not None and self._judge_at <= now:
            sends += self._judge()
        for worker in self.workers.values():
            if worker.life is Life.RETURNING and now >= worker.changed + RETURN_SECONDS:
                worker.become(Life.OUT, now)
            if worker.leaving is not None and now >= worker.leaving and worker.life is not Life.GONE:
                worker.leaving, worker.owes = float("inf"), False
                self.acts.append(Kill(worker.number))
        return sends + self._go_on()

    def deadline(self) -> float | None:
        """The next moment at which `tick` must be called."""
        # What `tick` alone does is due even if the moment has passed meanwhile.
        due = [one.deadline for one in self._rounds if one.phase is not Phase.RUNNING]
        due += [self._judge_at] if self._judge_at is not None else []
        later: list[float] = []
        if self._below_since is not None:
            later.append(self._below_since + self.limits.elastic_timeout)
        if self._enough_since is not None and self.runs == 0:
            later.append(self._enough_since + FIRST_SECONDS)
        for worker in self.workers.values():
            if worker.life is Life.RETURNING:
                due.append(worker.changed + RETURN_SECONDS)
            elif worker.life is Life.OUT:
                later.append(worker.changed + self.times.replace)
            elif worker.life is Life.LEFT:
                later.append(worker.changed + LEFT_SECONDS)
            if worker.leaving is not None and worker.leaving < float("inf"):
                due.append(worker.leaving)
            later.append(worker.barred)
        later += list(self.left_out.values())
        room = len(self._live()) < self.limits.most
        for host in self.hosts.values():
            if self._usable(host) and room:
                later += [max(host.not_before, slot.not_before) for slot in host.places if slot.worker is None]
        return min([*due, *(moment for moment in later if self._now < moment < float("inf"))], default=None)

    # What ranks say.

    def message(self, member: int, message: Message, now: float) -> Sends:
        """What a member says."""
        self._now = now
        if isinstance(message, Hello):
            return self._hello(member, message, now)
        place = self._places.get(member)
        if place is None or getattr(message, "generation", -1) != place[0].generation:
            return []  # a late word of a generation that is over
        one, rank = place
        if isinstance(message, Leave):
            del self._places[member]
            return self._leave(one, rank, message.again) + self._go_on()
        if isinstance(message, LinkBroken):
            return self._complain(one, rank, message)
        sends = super().message(member, message, now)
        while self.warnings:
            self.acts.append(Say(self.warnings.pop(0)))
        return sends + self._go_on()

    def gone(self, member: int, reason: str, now: float = 0.0) -> Sends:
        """A member's connection has ended."""
        self._now = max(now, self._now)
        for worker in self.workers.values():
            if worker.member == member:
                return self._evict(worker, reason) + self._go_on()
        return []

    def _hello(self, member: int, hello: Hello, now: float) -> Sends:
        wrong = self._wrong(hello)
        if wrong:
            self.acts.append(Say(wrong))
            return [(member, Rejected(wrong))]
        other = self._other_wire(hello)
        if other:
            self.acts.append(Say(other))
            return [(member, Rejected(other)), *self._refuse_the_waiting(other), *self._go_on()]
        worker = self.workers.get(hello.worker)
        slot = self._slot(worker) if worker is not None else None
        if worker is not None and worker.life is not Life.GONE and slot is not None and slot.worker is None:
            slot.worker = worker.number  # it was given up, but nobody has been put in its place
        if worker is None or worker.life is Life.GONE or not self._has_place(worker):
            if worker is not None and worker.life is not Life.GONE:
                worker.dismissed = True
                worker.leaving = worker.leaving or now + self.limits.drain_timeout
                worker.become(Life.LEFT, now)
            return [(member, Removed("its place in the job has been taken away or filled")), *self._go_on()]
        sends: Sends = []
        if worker.member is not None and worker.member != member:
            self.acts.append(Drop(worker.member))
            sends += self._evict(worker, "it came anew over another connection")
        worker.member = member
        worker.hello = hello
        worker.become(Life.READY, now)
        return sends + self._go_on()

    def _wrong(self, hello: Hello) -> str:
        if max(map(len, (hello.host, hello.package, hello.local, hello.remote, hello.wire))) > MAX_TEXT:
            return f"worker {hello.worker} has a host name or an address of more than {MAX_TEXT} characters"
        if hello.package != self.package:
            return (
                f"worker {hello.worker} on {hello.host} has farandole {hello.package}, the launcher {self.package}: "
                "install the same version on every host"
            )
        return ""

    def _other_wire(self, hello: Hello) -> str:
        known = (
            worker for worker in self.workers.values() if worker.hello is not None and worker.life is not Life.GONE
        )
        for worker in known:
            assert worker.hello is not None
            if worker.hello.wire != hello.wire:
                return different_wires(f"worker {hello.worker}", hello, f"worker {worker.number}", worker.hello)
        return ""

    def _refuse_the_waiting(self, text: str) -> Sends:
        """Before anything has run nobody knows whose build is the right one: all are told. A job that runs goes on."""
        if self.runs or any(worker.life is Life.IN for worker in self.workers.values()):
            return []
        sends: Sends = []
        for worker in self.workers.values():
            if worker.life is Life.READY and worker.member is not None:
                sends.append((worker.member, Rejected(text)))
                worker.member = None
                worker.become(Life.OUT, self._now)
        return sends

    def _leave(self, one: Round, rank: int, again: int) -> Sends:
        worker = self._member(one, rank)
        worker.member = None
        worker.dismissed = again == 2
        # Where somebody was lost meanwhile, it may not have come to the step at which all save.
        worker.owes = worker.owes and self._broken and again == 1
        worker.become(Life.RETURNING if again in (1, 3) else Life.LEFT, self._now)
        if one.phase is not Phase.RUNNING:
            del one.members[rank]
            return self._end(one, f"rank {rank} left while the ranks were {one.phase.value}")
        return self._left(one, rank)

    def _member(self, one: Round, rank: int) -> Worker:
        return next(w for w in self.workers.values() if w.member == one.members[rank])

    def _complain(self, one: Round, rank: int, message: LinkBroken) -> Sends:
        if one.phase is Phase.RUNNING or message.peer not in one.members:
            return []
        self._complaints.append((min(rank, message.peer), max(rank, message.peer)))
        self._judge_at = self._judge_at or self._now + COMPLAINT_SECONDS
        return []

    def _judge(self) -> Sends:
        """Two ranks have no link though both reach us: one of them has to wait."""
        complaints, self._complaints, self._judge_at = self._complaints, [], None
        one = next((one for one in self._rounds if one.phase is not Phase.RUNNING), None)
        if one is None or not complaints:
            return []
        rank = policy.loser(complaints)
        text = f"rank {rank} cannot be reached by others"
        if rank in one.members:
            worker = self._member(one, rank)
            worker.complaints += 1
            seconds = self.times.barred * 2.0 ** min(worker.complaints - 1, 6)
            worker.barred = self._now + seconds
            text = f"{self.name(worker)} cannot be reached by others: out for {seconds:g} s"
            self.acts.append(Say(text))
        return self._end(one, text)

    # Lives.

    def _evict(self, worker: Worker, text: str) -> Sends:
        """Nobody waits for it any more; it may come again as a new member while its slot is free."""
        if worker.life in (Life.STARTING, Life.OUT, Life.LEFT, Life.GONE):
            worker.member = None
            return []
        sends = self._depart(worker, text)
        if worker.member is not None:
            self.acts.append(Drop(worker.member))
        worker.member = None
        worker.become(Life.OUT, self._now)
        return sends

    def _bury(self, worker: Worker, text: str) -> Sends:
        sends = self._depart(worker, text)
        worker.member = None
        worker.become(Life.GONE, self._now)
        return sends

    def _depart(self, worker: Worker, text: str) -> Sends:
        """Takes it out of its round and tells the others at once."""
        if worker.member is None or worker.member not in self._places:
            return []
        one, rank = self._places.pop(worker.member)
        del one.members[rank]
        said = f"{self.name(worker)} was lost: {text}"
        if one.phase is not Phase.RUNNING:
            return self._end(one, said)
        self._broken = True
        sends = one.tell(Lost(one.generation, rank, said))
        if not one.members and one in self._rounds:
            self._rounds.remove(one)
        return sends

    def _end(self, one: Round, text: str) -> Sends:
        """This attempt has failed: all come anew."""
        if one.phase is Phase.RUNNING:
            return []
        sends = one.tell(Retry(text))
        for member in one.members.values():
            self._places.pop(member, None)
            for worker in self.workers.values():
                if worker.member == member:
                    worker.member = None
                    if worker.life is Life.IN:
                        worker.become(Life.RETURNING, self._now)
        one.members.clear()
        if one in self._rounds:
            self._rounds.remove(one)
        self._complaints, self._judge_at = [], None
        return sends

    def _failed(self, worker: Worker, slot: Slot | None, from_outside: bool) -> None:
        if slot is not None:
            good = worker.generation > 0 and (from_outside or self._now - worker.started > policy.GOOD_LIFE)
            slot.failures = 1 if good else slot.failures + 1
            slot.not_before = self._now + policy.backoff(slot.failures)
            if slot.failures == policy.MOST_FAILURES:
                where = f"slot {worker.index} of {worker.host}"
                self.acts.append(Say(f"{where} has failed {slot.failures} times in a row: it stays empty"))
        host = self.hosts[worker.host]
        self._failures[host.name] += 1
        seconds = float("inf")
        if self.limits.cooldown is not None:
            seconds = policy.cooldown(self.limits.cooldown, self._failures[host.name], self._draw.random())
        if self.limits.leave_hosts_out:
            self.left_out[host.name] = self._now + seconds
            howlong = "" if seconds == float("inf") else f" for {seconds:.0f} s"
            self.acts.append(Say(f"{host.name} is left out{howlong}, because a rank has failed there"))
        elif self.limits.cooldown is not None:
            host.not_before = self._now + seconds
            self.acts.append(Say(f"{host.name} gets no new ranks for {seconds:.0f} s, because one has failed there"))

    # What follows from it.

    def _go_on(self) -> Sends:
        if self.over is not None:
            return []
        self.workers = {number: one for number, one in self.workers.items() if one.life is not Life.GONE}
        self.left_out = {name: until for name, until in self.left_out.items() if until > self._now}
        self._take_slots_away()
        sends = self._begin()
        self._replace_the_silent()
        self._fill()
        sends += self._notify()
        self._look_for_the_end()
        return sends

    def _begin(self) -> Sends:
        """Begins a generation if it may be."""
        lives = Counter(one.life for one in self.workers.values())
        sends = self._dismiss_ready()
        left = [w for w in self.workers.values() if w.life is Life.LEFT and self._now < w.changed + LEFT_SECONDS]
        if lives[Life.IN] or lives[Life.RETURNING] or any(not one.dismissed for one in left):
            self._below_since = None
            return sends
        ready = self._ready()
        need = 1 if self.finishing else self.limits.min_np if self.runs else self.limits.np
        # Somebody has to bring the state of the last generation.
        enough = len(ready) >= need and (not self.runs or any(one.rank >= 0 for one in ready))
        if not enough:
            self._enough_since = None
            self._below_since = self._now if self._below_since is None else self._below_since
            return sends
        self._below_since = None
        if self._enough_since is None:
            self._enough_since = self._now
        if not self.runs and lives[Life.STARTING] and self._now < self._enough_since + FIRST_SECONDS:
            return sends
        if self.limits.reset_limit is not None and self.runs > self.limits.reset_limit:
            self._end_job(True, policy.RESET_LIMIT_EXCEEDED_MESSAGE.format(self.limits.reset_limit))
            return sends
        return sends + self._welcome_all(policy.arrange(policy.choose(ready, self.limits.most)))

    def _dismiss_ready(self) -> Sends:
        sends: Sends = []
        for worker in self.workers.values():
            if worker.life is Life.READY and worker.member is not None and not self._has_place(worker):
                sends.append((worker.member, Removed("its place in the job has been taken away")))
                worker.dismissed = True
                worker.leaving = worker.leaving or self._now + self.limits.drain_timeout
                worker.become(Life.LEFT, self._now)
        return sends

    def _welcome_all(self, order: Sequence[Candidate]) -> Sends:
        self.generation += 1
        one = Round(deadline=self._now + LINK_SECONDS, phase=Phase.PROVING, generation=self.generation)
        self._rounds.append(one)
        self._enough_since = None
        self._told.clear()
        self._complaints, self._judge_at = [], None
        for rank, candidate in enumerate(order):
            worker = self.workers[candidate.worker]
            assert worker.member is not None and worker.hello is not None
            worker.rank = rank
            worker.become(Life.IN, self._now)
            one.members[rank] = worker.member
            one.hellos[rank] = worker.hello
            self._places[worker.member] = (one, rank)
        hellos = [one.hellos[rank] for rank in range(len(order))]
        told = welcome(one, hellos)
        places = places_of([(one.hello.host, one.local) for one in self.members if one.hello is not None])
        return [(one.members[rank], dataclasses.replace(told, place=places[rank])) for rank in range(len(order))]

    def _linked(self, one: Round, rank: int) -> Sends:
        sends = super()._linked(one, rank)
        if one.phase is Phase.RUNNING:
            self.runs += 1
            self.last = one.generation
            self.roster = {worker.rank: worker.number for worker in self.members}
            self.commit = one.hellos[0].commit
            self._broken = False
            for worker in self.members:
                worker.generation = one.generation
                worker.complaints = 0
        return sends

    def _notify(self) -> Sends:
        """Tells the members of a generation who wants to come and who has to go."""
        one = next((one for one in self._rounds if one.phase is Phase.RUNNING), None)
        members = self.members
        if one is None or self._broken or not members:
            return []
        news = {(w.number, policy.REMOVED) for w in members if w.leaving is not None}
        room = self.limits.most - len(members) + len(news)
        if not self.finishing and room > 0:
            # Members that have left it already come back by themselves.
            new = [c.worker for c in self._ready() if self.workers[c.worker].generation != one.generation]
            news |= {(number, policy.ADDED) for number in new}
        fresh = news - self._told
        if not fresh:
            return []
        self._told |= fresh
        self._stamp += 1
        result = 0
        for _, kind in fresh:
            result |= kind
        owing = [w.leaving - self._now for w in members if w.owes and w.leaving is not None]
        hurry = max(1, round(min(owing) * 1000)) if owing and result & policy.REMOVED else 0
        return one.tell(MembershipUpdate(one.generation, self._stamp, result, hurry))

    def _look_for_the_end(self) -> None:
        alive = [w for w in self.workers.values() if w.life is not Life.GONE and not w.dismissed]
        if self.finishing:
            if not [w for w in alive if w.life is not Life.OUT and w.generation + (w.life is Life.IN) > 0]:
                self._end_job(False, "")
            return
        if not alive and self.hosts and all(self.left_out.get(name) == float("inf") for name in self.hosts):
            self._end_job(True, ALL_LEFT_OUT)
            return
        if self.runs:
            if not any(map(self._holds, alive)):
                if self.drained and not any(host.usable for host in self.hosts.values()):
                    self._end_job(False, "")
                    return
                self._end_job(True, "every rank that had the state of the job has ended")
                return
        elif self._early and not [w for w in alive if w.life is not Life.READY]:
            if alive:
                text = f"{self._early}, and {len(alive)} others wait for it: each rank has to call init()"
                self._end_job(True, text)
            else:
                self._end_job(False, "")  # a command that is no training at all
            return
        elif not [w for w in alive if w.life is not Life.STARTING]:
            slots = [slot for host in self.hosts.values() for slot in host.places]
            if slots and sum(slot.failures for slot in slots) >= max(policy.MOST_FAILURES_AT_START, len(slots)):
                self._end_job(True, "every rank failed before the first generation began")
                return
        if self._below_since is not None and self._now >= self._below_since + self.limits.elastic_timeout:
            self._end_job(True, self._missing())

    def stop(self) -> None:
        """The launcher ends the job: nothing is decided any more."""
        self.over = self.over or Over(False, "")

    def _end_job(self, failed: bool, text: str) -> None:
        if self.over is None:
            self.over = Over(failed, text)
            self.acts.append(self.over)
