# The driver of an elastic job: who is a member, who is waited for, who may join; the only issuer of generations.
# Pure: no sockets, no processes; time is an argument. Uses state.py, slots.py, generations.py and end.py.
"""Messages of ranks come in through `message` and `connection_lost`, reports of the launcher through `hosts_found`,
`ended` and others.
Each returns the messages to send. `take_actions` returns what the launcher must do.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from farandole.rendezvous.elastic import policy
from farandole.rendezvous.elastic.end import end_of_job
from farandole.rendezvous.elastic.generations import Generations
from farandole.rendezvous.elastic.members import Action, Drop, Host, Kill, Over, Status, Worker
from farandole.rendezvous.elastic.policy import Limits, Times
from farandole.rendezvous.elastic.slots import Slots
from farandole.rendezvous.elastic.state import JobState
from farandole.rendezvous.messages import Hello, Message, Rejected, Removed
from farandole.rendezvous.phases import Sends, package_mismatch, protocol_mismatch

FIRST_SECONDS = 2.0  # when -np ranks are ready, the first generation waits this long for those that are just starting
RETURN_SECONDS = 10.0  # between leaving one generation and asking for the next
CLOSING_SECONDS = 2.0  # between the end of a worker's connection and the end of its process
LEFT_SECONDS = 2.0  # a worker that left with a message may join again; the next generation waits this long for it


class ElasticDriver:
    """See the module. `draw` gives the random part of cool-downs."""

    def __init__(
        self, limits: Limits, package: str, times: Times | None = None, draw: random.Random | None = None
    ) -> None:
        self.state = JobState(limits, times or Times())
        self.over: Over | None = None
        self._package = package
        self._slots = Slots(self.state, draw or random.Random())
        self._generations = Generations(self.state)
        self._suspects: set[int] = set()  # workers that are silent
        self._enough_since: float | None = None  # since when enough workers are ready

    @property
    def generation(self) -> int:
        """The number of the newest generation, whether it ran or not."""
        return self._generations.newest

    def take_actions(self) -> list[Action]:
        """What the launcher must do, in order; each once."""
        actions, self.state.actions = self.state.actions, []
        return actions

    def complete(self) -> bool:
        """Never: a worker may join at any time."""
        return False

    def process_ended(self, rank: int, reason: str) -> Sends:
        """Nothing: the launcher of an elastic job calls `ended`."""
        return []

    def take_warnings(self) -> list[str]:
        """None: warnings are among the actions."""
        return []

    def stop(self) -> None:
        """The launcher ends the job: nothing is decided any more."""
        self.over = self.over or Over(failed=False, text="")

    # What the launcher knows.

    def hosts_found(self, found: Sequence[tuple[str, int]], now: float) -> Sends:
        """Discovery names these hosts and their numbers of slots."""
        self.state.now = now
        counts = dict(found)
        hosts = self.state.hosts
        for name, count in counts.items():
            host = hosts.setdefault(name, Host(name, count))
            if not host.listed:
                host.drained = False  # it was away, and comes back as a new one
            host.listed, host.slot_count = True, count
        for host in hosts.values():
            if host.name not in counts:
                host.listed = False
        return self._go_on()

    def host_lost(self, name: str, text: str, now: float) -> Sends:
        """An agent is gone, and all its processes with it."""
        state = self.state
        state.now = now
        sends: Sends = []
        host = state.hosts[name]
        host.up = False
        lost = [one for one in state.workers.values() if one.host == name and one.status is not Status.ENDED]
        for worker in lost:
            sends += self._generations.ended(worker, text)
            worker.dismissed = True
        for slot in host.slots:
            slot.worker = None
        return sends + self._go_on()

    def host_silent(self, name: str, now: float) -> Sends:
        """A host was silent for the time of eviction."""
        state = self.state
        state.now = now
        host = state.hosts[name]
        if not host.up:
            return []
        host.up = False
        state.say(f"{name} has been silent for {state.times.evict:g} s: its ranks are out until it is back")
        sends: Sends = []
        for worker in state.workers.values():
            if worker.host == name:
                sends += self._generations.evict(worker, f"{name} is silent")
        return sends + self._go_on()

    def host_up(self, name: str, now: float) -> Sends:
        """A host can be reached, for the first time or again."""
        self.state.now = now
        self.state.hosts[name].up = True
        return self._go_on()

    def drain(self, name: str, seconds: float, now: float) -> Sends:
        """A host must leave within this time."""
        state = self.state
        state.now = now
        state.hosts[name].drained = True
        state.drained = True
        for worker in state.workers.values():
            if worker.host == name and worker.leaving is None and worker.status is not Status.STARTING:
                worker.leaving = now + seconds
                worker.must_save = worker.generation > 0
        return self._go_on()

    def silence_reported(self, number: int, seconds: float, state: str, now: float) -> Sends:
        """An agent says how long a worker has been silent (0: it is not), and the kernel's letter for its process."""
        known = self.state
        known.now = now
        worker = known.workers.get(number)
        if worker is None or worker.status in (Status.OUT, Status.ENDED) or not seconds:
            self._suspects.discard(number)
            return []
        text = f"has shown no sign of life for {seconds:.1f} s ({policy.STATES.get(state, 'it does not run')})"
        if number not in self._suspects:
            self._suspects.add(number)
            known.say(f"{known.name(worker)} {text}")
        members = [one.number for one in known.members]
        most = policy.most_fell_silent(len(self._suspects.intersection(members)), len(members))
        if seconds < known.times.evict or (seconds < known.times.give_up and (most or state == "D")):
            return []
        self._suspects.discard(number)
        return self.evict_silent(number, text, now)

    def evict_silent(self, number: int, text: str, now: float) -> Sends:
        """A worker was silent for the time of eviction."""
        state = self.state
        state.now = now
        worker = state.workers.get(number)
        if worker is None or worker.status in (Status.STARTING, Status.OUT, Status.ENDED):
            return []
        state.say(f"{state.name(worker)} {text}: evicted")
        return self._generations.evict(worker, text) + self._go_on()

    def ended(self, number: int, code: int, text: str, now: float) -> Sends:
        """A worker's process has ended."""
        state = self.state
        state.now = now
        worker = state.workers.get(number)
        if worker is None or worker.status is Status.ENDED:
            return []
        slot = state.own_slot(worker)
        # The end of an evicted worker does not mean that the training has ended. A worker whose connection ended just
        # before its process was not evicted.
        was_out = worker.status is Status.OUT and now > worker.changed + CLOSING_SECONDS
        sends = self._generations.ended(worker, text)
        if slot is not None:
            slot.worker = None
        if worker.dismissed or worker.leaving is not None or (code == 0 and was_out):
            return sends + self._go_on()
        if code == 0 and worker.generation:
            state.finishing = True
        elif code == 0 and not state.runs:
            state.early = f"{state.name(worker)} ended with exit code 0 before the ranks had met"
            if slot is not None:
                slot.not_before = float("inf")  # a new process would do the same
        else:
            self._slots.count_failure(worker, slot, policy.killed_from_outside(code, text))
        return sends + self._go_on()

    def tick(self, now: float) -> Sends:
        """Does what is due."""
        state = self.state
        state.now = now
        sends = self._generations.tick()
        for worker in state.workers.values():
            if worker.status is Status.RETURNING and now >= worker.changed + RETURN_SECONDS:
                worker.become(Status.OUT, now)
            if worker.leaving is not None and now >= worker.leaving and worker.status is not Status.ENDED:
                worker.leaving, worker.must_save = float("inf"), False
                state.actions.append(Kill(worker.number))
        return sends + self._go_on()

    def deadline(self) -> float | None:
        """The next moment at which `tick` must be called."""
        state = self.state
        due = self._generations.deadlines()  # `tick` must do these even if the moment has passed meanwhile
        later: list[float] = []
        if state.below_since is not None:
            later.append(state.below_since + state.limits.elastic_timeout)
        if self._enough_since is not None and state.runs == 0:
            later.append(self._enough_since + FIRST_SECONDS)
        for worker in state.workers.values():
            if worker.status is Status.RETURNING:
                due.append(worker.changed + RETURN_SECONDS)
            elif worker.status is Status.OUT:
                later.append(worker.changed + state.times.replace)
            elif worker.status is Status.LEFT:
                later.append(worker.changed + LEFT_SECONDS)
            if worker.leaving is not None and worker.leaving < float("inf"):
                due.append(worker.leaving)
            later.append(worker.excluded_until)
        later += list(state.left_out.values())
        room = len(state.live()) < state.limits.most
        for host in state.hosts.values():
            if state.usable(host) and room:
                later += [max(host.not_before, slot.not_before) for slot in host.slots if slot.worker is None]
        return min([*due, *(moment for moment in later if state.now < moment < float("inf"))], default=None)

    # What ranks say.

    def message(self, member: int, message: Message, now: float) -> Sends:
        """Handles a message of a member."""
        self.state.now = now
        if isinstance(message, Hello):
            return self._hello(member, message, now)
        sends = self._generations.message(member, message)
        return [] if sends is None else sends + self._go_on()

    def connection_lost(self, member: int, reason: str, now: float = 0.0) -> Sends:
        """Handles the end of a member's connection."""
        self.state.now = max(now, self.state.now)
        for worker in self.state.workers.values():
            if worker.member == member:
                return self._generations.evict(worker, reason) + self._go_on()
        return []

    def _hello(self, member: int, hello: Hello, now: float) -> Sends:
        state = self.state
        wrong = package_mismatch(f"worker {hello.worker}", hello, self._package)
        if wrong:
            state.say(wrong)
            return [(member, Rejected(wrong))]
        other = self._other_wire(hello)
        if other:
            state.say(other)
            return [(member, Rejected(other)), *self._reject_ready(other), *self._go_on()]
        worker = state.workers.get(hello.worker)
        slot = state.slot(worker) if worker is not None else None
        if worker is not None and worker.status is not Status.ENDED and slot is not None and slot.worker is None:
            slot.worker = worker.number  # its slot was given up, but no other worker has been started there
        if worker is None or worker.status is Status.ENDED or not state.may_continue(worker):
            if worker is not None and worker.status is not Status.ENDED:
                self._dismiss(worker)
            return [(member, Removed("its slot has been taken away or is used by another worker")), *self._go_on()]
        sends: Sends = []
        if worker.member is not None and worker.member != member:
            state.actions.append(Drop(worker.member))
            sends += self._generations.evict(worker, "it came again over another connection")
        worker.member = member
        worker.hello = hello
        worker.become(Status.READY, now)
        return sends + self._go_on()

    def _other_wire(self, hello: Hello) -> str:
        for worker in self.state.workers.values():
            known = worker.hello if worker.status is not Status.ENDED else None
            if known is not None and known.wire != hello.wire:
                return protocol_mismatch(f"worker {hello.worker}", hello, f"worker {worker.number}", known)
        return ""

    def _reject_ready(self, text: str) -> Sends:
        """Before a generation has run, no build is known to be the right one: all workers are told. Later the job goes
        on without the worker that has another build."""
        state = self.state
        if state.runs or state.members:
            return []
        sends: Sends = []
        for worker in state.workers.values():
            if worker.status is Status.READY and worker.member is not None:
                sends.append((worker.member, Rejected(text)))
                worker.member = None
                worker.become(Status.OUT, state.now)
        return sends

    # What follows from it.

    def _go_on(self) -> Sends:
        state = self.state
        if self.over is not None:
            return []
        state.workers = {number: one for number, one in state.workers.items() if one.status is not Status.ENDED}
        state.left_out = {name: until for name, until in state.left_out.items() if until > state.now}
        self._slots.take_away()
        sends = self._begin()
        self._slots.release_silent()
        self._slots.fill()
        sends += self._generations.notify()
        if self.over is None:
            self._end(end_of_job(state))
        return sends

    def _begin(self) -> Sends:
        """Begins a generation if nothing else must be waited for."""
        state, limits = self.state, self.state.limits
        sends = self._dismiss_ready()
        counts = Counter(one.status for one in state.workers.values())
        left = [w for w in state.workers.values() if w.status is Status.LEFT and state.now < w.changed + LEFT_SECONDS]
        if counts[Status.MEMBER] or counts[Status.RETURNING] or any(not one.dismissed for one in left):
            state.below_since = None
            return sends
        ready = state.ready()
        need = 1 if state.finishing else limits.min_np if state.runs else limits.np
        # At least one member of the last generation must bring its state.
        enough = len(ready) >= need and (not state.runs or any(one.rank >= 0 for one in ready))
        if not enough:
            self._enough_since = None
            state.below_since = state.now if state.below_since is None else state.below_since
            return sends
        state.below_since = None
        if self._enough_since is None:
            self._enough_since = state.now
        if not state.runs and counts[Status.STARTING] and state.now < self._enough_since + FIRST_SECONDS:
            return sends
        if limits.reset_limit is not None and state.runs > limits.reset_limit:
            self._end(Over(failed=True, text=policy.RESET_LIMIT_EXCEEDED_MESSAGE.format(limits.reset_limit)))
            return sends
        self._enough_since = None
        return sends + self._generations.begin(policy.arrange(policy.choose(ready, limits.most)))

    def _dismiss_ready(self) -> Sends:
        sends: Sends = []
        for worker in self.state.workers.values():
            if worker.status is Status.READY and worker.member is not None and not self.state.may_continue(worker):
                sends.append((worker.member, Removed("its slot has been taken away")))
                self._dismiss(worker)
        return sends

    def _dismiss(self, worker: Worker) -> None:
        state = self.state
        worker.dismissed = True
        worker.leaving = worker.leaving or state.now + state.limits.drain_timeout
        worker.become(Status.LEFT, state.now)

    def _end(self, over: Over | None) -> None:
        if over is not None and self.over is None:
            self.over = over
            self.state.actions.append(over)
