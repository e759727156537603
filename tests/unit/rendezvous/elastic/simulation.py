# A job in virtual time: a real driver, simulated processes, connections, agents and collectives; faults at random.
# Pure: one heap of events and one random generator.
"""`Simulation(seed).run(faults)` raises AssertionError at a split brain, a lost commit or a deadlock."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from farandole.rendezvous import messages
from farandole.rendezvous.elastic.driver import ElasticDriver
from farandole.rendezvous.elastic.members import Drop, Kill, Over, Say, Start, Status
from farandole.rendezvous.elastic.policy import Limits, Times
from farandole.rendezvous.phases import Sends

STEP = 0.8
FAULTS = ("kill", "kill", "stop", "stop", "partition", "cut", "hosts", "kill host", "late", "fail", "drain")


@dataclass(eq=False)
class Wire:
    """A connection to the hub. Bytes arrive in order, after a delay, and not while the host has no network."""

    number: int
    process: Process
    open: bool = True
    up_at: float = 0.0
    down_at: float = 0.0


@dataclass(eq=False)
class Process:
    worker: int
    host: str
    alive: bool = True
    stopped: bool = False
    wire: Wire | None = None
    generation: int = 0
    members: tuple[int, ...] = ()  # processes, by rank
    rank: int = -1
    running: bool = False
    revoked: bool = False
    updated: bool = False
    commit: int = 0
    waiting: list[Callable[[], None]] = field(default_factory=list)  # calls that run when it is continued (SIGCONT)


class Simulation:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = itertools.count()
        self.wires: dict[int, Wire] = {}
        self.processes: dict[int, Process] = {}
        self.offline: set[str] = set()  # hosts without any network
        self.held: list[Callable[[], None]] = []  # calls that wait until the network works again
        self.cut: set[frozenset[str]] = set()  # pairs of hosts without a link between them
        self.listed = {f"h{n}": self.random.randint(1, 2) for n in range(self.random.randint(2, 3))}
        np = sum(self.listed.values())
        least = self.random.randint(1, np)
        most = self.random.choice([None, np, np + 1])
        self.times = Times()
        self.limits = Limits(np, least, most, None, None, elastic_timeout=100.0)
        self.driver = ElasticDriver(self.limits, "1", self.times, random.Random(seed))
        self.committed: dict[int, int] = {}  # step -> generation in which all had it
        self.applied: dict[tuple[int, int], set[int]] = {}
        self.began: dict[int, tuple[int, ...]] = {}  # generations that ran
        self.faults = 0
        self.changes = 0
        self.over: Over | None = None
        self.ticking: float | None = None
        self.latency = 0.002

    # Time.

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.count), act))

    def until(self, moment: float) -> None:
        while self.events and self.events[0][0] <= moment and self.over is None:
            self.now, _, act = heapq.heappop(self.events)
            act()
        self.now = max(self.now, moment)

    def delay(self) -> float:
        return self.latency * self.random.uniform(0.5, 1.5)

    def deliver(self, sends: Sends) -> None:
        for member, message in sends:
            wire = self.wires.get(member)
            if wire is not None and wire.open:
                self.down(wire, message)
        for act in self.driver.take_actions():
            if isinstance(act, Start):
                self.start(act)
            elif isinstance(act, Kill):
                self.after(self.delay(), lambda worker=act.worker: self.die(self.processes[worker], 137))  # type: ignore[misc]
            elif isinstance(act, Drop):
                self.hang_up(act.member)
            elif isinstance(act, Over):
                self.over = act
            else:
                assert isinstance(act, Say)
        moment = self.driver.deadline()
        if moment is not None and moment != self.ticking:
            self.ticking = moment
            self.after(max(0.0, moment - self.now), lambda: self.tick(moment))

    def tick(self, moment: float) -> None:
        if self.ticking == moment:
            self.ticking = None
            self.deliver(self.driver.tick(self.now))

    # Connections.

    def carry(self, wire: Wire, act: Callable[[], None], upwards: bool) -> None:
        """Calls `act` when the bytes arrive, in order."""
        if wire.process.host in self.offline:
            self.held.append(lambda: self.carry(wire, act, upwards))
            return
        moment = self.now + self.delay()
        if upwards:
            moment = wire.up_at = max(moment, wire.up_at + 1e-6)
        else:
            moment = wire.down_at = max(moment, wire.down_at + 1e-6)
        self.after(moment - self.now, act)

    def up(self, process: Process, message: messages.Message) -> None:
        wire = process.wire
        if wire is not None:
            self.carry(wire, lambda: self.to_hub(wire, message), True)

    def to_hub(self, wire: Wire, message: messages.Message) -> None:
        if wire.open:
            self.deliver(self.driver.message(wire.number, message, self.now))

    def down(self, wire: Wire, message: messages.Message) -> None:
        self.carry(wire, lambda: self.awake(wire.process, lambda: self.receive(wire, message)), False)

    def hang_up(self, number: int) -> None:
        """The hub closes a connection."""
        wire = self.wires.pop(number, None)
        if wire is not None and wire.open:
            wire.open = False
            self.carry(wire, lambda: self.awake(wire.process, lambda: self.lost_hub(wire)), False)

    def lost_hub(self, wire: Wire) -> None:
        process = wire.process
        if process.alive and process.wire is wire:
            process.wire = None
            if process.running:
                process.revoked = True
            self.come(process, 0.01)

    def awake(self, process: Process, act: Callable[[], None]) -> None:
        if not process.alive:
            return
        if process.stopped:
            process.waiting.append(act)
        else:
            act()

    # Processes.

    def start(self, act: Start) -> None:
        process = self.processes[act.worker] = Process(act.worker, act.host)
        self.come(process, self.random.uniform(0.2, 3.0))

    def come(self, process: Process, seconds: float) -> None:
        """Sends Hello over a new connection. Without a network it retries every second."""

        def act() -> None:
            if process.wire is not None:
                return
            if process.host in self.offline:
                self.after(1.0, lambda: self.awake(process, act))
                return
            wire = Wire(next(self.count), process)
            self.wires[wire.number] = wire
            process.wire = wire
            process.running = process.revoked = process.updated = False
            process.generation, process.members = 0, ()
            hello = messages.Hello(
                0, 1, process.host, process.worker, "1", 1, 1000, 1, "l", "r", process.worker, process.commit
            )
            self.up(process, hello)

        self.after(seconds, lambda: self.awake(process, act))

    def leave(self, process: Process, again: bool = True) -> None:
        """Leaves its generation, and joins the next one at once."""
        wire = process.wire
        if wire is None:
            return
        if process.running:
            self.up(process, messages.Leave(process.generation, int(again)))
        self.carry(wire, lambda: self.eof(wire, "closed"), True)
        process.wire = None
        process.running = False
        self.come(process, self.delay())

    def eof(self, wire: Wire, reason: str) -> None:
        if wire.open:
            wire.open = False
            self.wires.pop(wire.number, None)
            self.deliver(self.driver.connection_lost(wire.number, reason, self.now))

    def receive(self, wire: Wire, message: messages.Message) -> None:
        process = wire.process
        if process.wire is not wire:
            return
        if isinstance(message, messages.Retry):
            self.leave(process)
        elif isinstance(message, messages.Removed):
            self.die(process, 0)
        elif isinstance(message, messages.Welcome):
            process.generation = message.generation
            process.rank = message.numbers[0]
            ranks = {w.rank: w.number for w in self.driver.state.workers.values() if w.status is Status.MEMBER}
            process.members = tuple(ranks.get(rank, -1) for rank in range(message.numbers[1]))
            self.after(
                self.delay(),
                lambda: self.awake(
                    process, lambda: self.up(process, messages.MemoryProved(message.generation, (), ""))
                ),
            )
        elif isinstance(message, messages.HostsAgreed):
            self.link(process)
        elif isinstance(message, messages.Started):
            process.running = True
            self.begin(process)
        elif isinstance(message, messages.Lost):
            self.revoke(process, message.generation)
        elif isinstance(message, messages.MembershipUpdate):
            process.updated = True
        else:
            assert not isinstance(message, messages.Rejected), message

    def link(self, process: Process) -> None:
        blocked = [
            rank
            for rank, number in enumerate(process.members)
            if rank > process.rank and number in self.processes and not self.connected(process, self.processes[number])
        ]
        generation = process.generation
        if blocked:
            text = messages.LinkBroken(generation, blocked[0], "no way")
            self.after(
                4.0,
                lambda: self.awake(
                    process, lambda: self.up(process, text) if process.generation == generation else None
                ),
            )
        else:
            self.after(self.delay(), lambda: self.awake(process, lambda: self.up(process, messages.Linked(generation))))

    def connected(self, one: Process, other: Process) -> bool:
        if one.host == other.host:
            return True
        return not ({one.host, other.host} & self.offline) and frozenset((one.host, other.host)) not in self.cut

    def revoke(self, process: Process, generation: int) -> None:
        """The user's thread gets the error at its next call, and resets."""
        if process.running and not process.revoked and process.generation == generation:
            process.revoked = True
            self.after(
                self.random.uniform(0.001, 0.3), lambda: self.awake(process, lambda: self.reset(process, generation))
            )

    def reset(self, process: Process, generation: int) -> None:
        if process.running and process.generation == generation:
            self.leave(process)

    def die(self, process: Process, code: int) -> None:
        if not process.alive:
            return
        process.alive = False
        wire = process.wire
        if wire is not None:
            self.carry(wire, lambda: self.eof(wire, "died"), True)
        self.report(process, code)

    def report(self, process: Process, code: int) -> None:
        """The agent of the process reports its end."""
        if process.host in self.offline:
            self.after(0.5, lambda: self.report(process, code))
        else:
            self.after(
                self.delay() * 5, lambda: self.deliver(self.driver.ended(process.worker, code, "died", self.now))
            )

    # Training: a step is committed by each member at its own moment, once all have taken part.

    def begin(self, process: Process) -> None:
        generation = process.generation
        if generation not in self.began:
            self.began[generation] = process.members
            self.changes += 1
            assert generation == self.driver.state.last
            source = self.processes[process.members[0]]
            newest = max(self.committed, default=0)
            assert source.commit >= newest, f"commit {newest} is lost: {source} leads generation {generation}"
            step = source.commit
            self.after(STEP, lambda: self.step(generation, step, True))

    def step(self, generation: int, start: int, sync: bool = False) -> None:
        members = [self.processes[number] for number in self.began[generation]]
        alive = [one for one in members if one.alive and one.running and one.generation == generation]
        for one in alive:
            lost = [other for other in members if other not in alive and self.connected(one, other)]  # dead, or left
            if lost and not one.stopped:
                self.revoke(one, generation)
        together = (
            len(alive) == len(members)
            and not any(one.stopped or one.revoked for one in members)
            and all(self.connected(one, other) for one in members for other in members)
        )
        if not together:
            if generation == self.driver.state.last:
                broken = [one for one in alive if any(not self.connected(one, other) for other in members)]
                for one in broken:  # a link dies by itself after a while
                    self.after(4.0, lambda one=one: self.awake(one, lambda: self.revoke(one, generation)))  # type: ignore[misc]
                self.after(STEP, lambda: self.step(generation, start, sync))
            return
        if sync:  # all get the state of rank 0, each at its own moment
            for one in members:
                self.at_once(one, lambda one=one: self.synchronize(one, generation, start))  # type: ignore[misc]
            self.after(STEP, lambda: self.step(generation, start))
            return
        if any(one.updated for one in members):
            for one in members:
                self.leave(one)
            return
        step = start + 1
        for one in members:
            self.at_once(one, lambda one=one: self.apply(one, generation, step))  # type: ignore[misc]
        self.after(STEP, lambda: self.step(generation, step))

    def at_once(self, process: Process, act: Callable[[], None]) -> None:
        self.after(self.random.uniform(0.0, 0.05), lambda: self.awake(process, act))

    def synchronize(self, process: Process, generation: int, step: int) -> None:
        if process.running and process.generation == generation and not process.revoked:
            process.commit = step

    def apply(self, process: Process, generation: int, step: int) -> None:
        if not process.running or process.generation != generation or process.revoked:
            return
        assert process.commit <= step
        process.commit = step
        applied = self.applied.setdefault((generation, step), set())
        applied.add(process.worker)
        if applied == set(self.began[generation]):
            # The last one may have been stopped meanwhile; the others have then continued.
            other = self.committed.setdefault(step, generation)
            assert other == generation, (
                f"split brain: step {step} has two contents, of generations {other}, {generation}"
            )

    # Faults.

    def fault(self) -> None:
        kind = self.random.choice(FAULTS)
        alive = [one for one in self.processes.values() if one.alive]
        known = self.driver.state.workers
        holders = {
            one.worker
            for one in alive
            if one.worker in known and known[one.worker].generation == self.driver.state.last and not one.stopped
        }
        if kind in ("kill", "fail", "kill host") and self.random.random() < 0.99:
            # Mostly a rank with the state survives, because a job without it ends.
            if kind == "kill host":
                spared = [h for h in self.listed if any(self.processes[w].host != h for w in holders)]
                if spared:
                    self.faults += 1
                    self.lose_host(self.random.choice(spared))
                return
            alive = [one for one in alive if holders - {one.worker}]
        self.faults += 1
        if kind in ("kill", "fail") and alive:
            self.die(self.random.choice(alive), 137 if kind == "kill" else 1)
        elif kind == "stop" and alive:
            self.stop(self.random.choice(alive), self.random.choice([0.5, 3.0, 8.0, 30.0]))
        elif kind == "partition" and not self.offline:
            self.partition(self.random.choice(list(self.listed)), self.random.choice([1.0, 4.7, 8.0]))
        elif kind == "cut" and len(self.listed) > 1 and not self.cut:
            pair = frozenset(self.random.sample(sorted(self.listed), 2))
            self.cut.add(pair)
            self.after(self.random.uniform(1, 20), self.cut.clear)
        elif kind == "hosts":
            self.edit()
        elif kind == "kill host":
            self.lose_host(self.random.choice(list(self.listed)))
        elif kind == "late":
            self.latency = self.random.choice([0.0005, 0.002, 0.2, 1.0])
        elif kind == "drain":
            host = self.random.choice(list(self.listed))
            self.deliver(self.driver.drain(host, 5.0, self.now))
            self.after(8.0, lambda: self.come_back(host))

    def stop(self, process: Process, seconds: float) -> None:
        if process.stopped:
            return
        process.stopped = True
        began = self.now

        def evict() -> None:
            if process.alive and process.stopped and process.host not in self.offline and self.now - began >= 4.99:
                self.deliver(self.driver.evict_silent(process.worker, "is silent", self.now))

        def go_on() -> None:
            process.stopped = False
            waiting, process.waiting = process.waiting, []
            for act in waiting:
                self.awake(process, act)

        self.after(self.times.evict, evict)
        self.after(seconds, go_on)

    def partition(self, host: str, seconds: float) -> None:
        self.offline.add(host)

        def silent() -> None:
            if host in self.offline:
                self.deliver(self.driver.host_silent(host, self.now))

        def lease() -> None:
            for one in self.processes.values():
                if host in self.offline and one.host == host:
                    self.awake(one, lambda one=one: self.revoke(one, one.generation))  # type: ignore[misc]

        def heal() -> None:
            self.offline.discard(host)
            held, self.held = self.held, []
            for act in held:
                act()
            self.after(0.5, lambda: self.deliver(self.driver.host_up(host, self.now)))

        self.after(self.times.revoke, lease)
        self.after(self.times.evict, silent)
        self.after(seconds, heal)

    def edit(self) -> None:
        """Somebody edits the list of hosts."""
        name = self.random.choice(["h0", "h1", "h2", "h3"])
        if name in self.listed and len(self.listed) > 1 and self.random.random() < 0.5:
            del self.listed[name]
        else:
            self.listed[name] = self.random.randint(1, 2)
        self.deliver(self.driver.hosts_found(list(self.listed.items()), self.now))

    def come_back(self, host: str) -> None:
        """A host that was drained goes from the list and comes back."""
        for listed in ([one for one in self.listed.items() if one[0] != host], list(self.listed.items())):
            self.deliver(self.driver.hosts_found(listed, self.now))

    def lose_host(self, host: str) -> None:
        """An agent dies, and all that is below it."""
        if host in self.offline or host not in self.driver.state.hosts:
            return
        for one in self.processes.values():
            if one.host == host and one.alive:
                one.alive = False
                if one.wire is not None:
                    self.carry(one.wire, lambda wire=one.wire: self.eof(wire, "died"), True)  # type: ignore[misc]
        self.after(self.delay(), lambda: self.deliver(self.driver.host_lost(host, "its agent died", self.now)))
        self.after(2.0, lambda: self.deliver(self.driver.host_up(host, self.now)))

    def run(self, faults: int) -> Over | None:
        self.deliver(self.driver.hosts_found(list(self.listed.items()), 0.0))
        self.until(self.random.choice([1.0, 6.0, 6.0, 6.0]))
        for _ in range(faults):
            self.until(self.now + self.random.choice([0.01, 0.3, 2.0, 7.0, 15.0]))
            if self.over is not None:
                return self.over
            self.fault()
        self.latency = 0.002
        before = max(self.committed, default=0)
        self.until(self.now + 120.0)
        if self.over is None:
            self.check_alive(before)
        return self.over

    def check_alive(self, before: int) -> None:
        """When the faults are over, all who can be in are in, and the work continues."""
        driver = self.driver
        lives = {
            one.number: (one.status.value, one.host, one.rank)
            for one in driver.state.workers.values()
            if one.status is not Status.ENDED
        }
        assert max(self.committed, default=0) > before + 10, f"the job stands still: {lives}"
        slots = sum(
            min(host.slot_count, sum(slot.failures < 10 for slot in host.slots))
            for host in driver.state.hosts.values()
            if host.listed and not host.drained
        )
        assert len(driver.state.members) == min(slots, self.limits.most), f"{slots} slots, but {lives}"
