# The places of an elastic job: hosts with slots, the workers in them, and who of them may be, stay or come.
# Pure: no sockets, no processes; time is an argument. Uses members.py, policy.py and the rounds of the rendezvous.
"""`Places` knows and answers; it ends nobody and begins no generation. That is for `ElasticDriver`."""

from __future__ import annotations

from collections.abc import Sequence

import farandole.rendezvous.elastic.policy as policy
from farandole.rendezvous.elastic.members import Act, Host, Life, Numbers, Slot, Start, Worker
from farandole.rendezvous.elastic.policy import Candidate, Limits, Times
from farandole.rendezvous.rounds import Rounds


class Places(Rounds):
    """See the module."""

    def __init__(self, limits: Limits, package: str, times: Times | None = None) -> None:
        super().__init__(limits.np, package)
        self.limits = limits
        self.times = times or Times()
        self.hosts: dict[str, Host] = {}  # in order of seniority
        self.workers: dict[int, Worker] = {}
        self.left_out: dict[str, float] = {}  # hosts where a rank failed, and until when; inf: for good
        self.acts: list[Act] = []
        self.finishing = False  # somebody has ended well: nobody else is started
        self.runs = 0  # generations that have run
        self.last = 0  # the newest generation that has run
        self.commit = 0  # how far the state had come when it began
        self._now = 0.0
        self._numbers = 0

    @property
    def members(self) -> list[Worker]:
        """Those of the generation that runs, by rank."""
        found = [one for one in self.workers.values() if one.life is Life.IN]
        return sorted(found, key=lambda one: one.rank)

    def name(self, worker: Worker) -> str:
        """A worker in words."""
        who = f"rank {worker.rank}" if worker.generation or worker.life is Life.IN else f"worker {worker.number}"
        pid = f"process {worker.hello.pid} " if worker.hello is not None else ""
        return f"{who} ({pid}on {worker.host})"

    def _usable(self, host: Host) -> bool:
        """Whether ranks may be started there and stay there."""
        return host.usable and host.name not in self.left_out

    def _has_place(self, worker: Worker) -> bool:
        slot = self._slot(worker)
        if slot is None or worker.dismissed or (worker.leaving is not None and not self._stays(worker)):
            return False
        if self.finishing and worker.generation == 0:
            return False  # the others are at the end
        return slot.worker == worker.number

    def _slot(self, worker: Worker) -> Slot | None:
        host = self.hosts.get(worker.host)
        return host.places[worker.index] if host is not None and worker.index < len(host.places) else None

    def _has_slot(self, worker: Worker) -> bool:
        slot = self._slot(worker)
        return slot is not None and slot.worker == worker.number

    def _live(self) -> list[Worker]:
        """Those that count against the largest world."""
        return [
            one
            for one in self.workers.values()
            if one.life is not Life.GONE and one.leaving is None and not one.dismissed and self._has_slot(one)
        ]

    def _ready(self) -> list[Candidate]:
        return [
            Candidate(one.number, one.host, one.hello.commit, one.rank if self._holds(one) else -1)
            for one in self.workers.values()
            if one.life is Life.READY
            and one.hello is not None
            and (one.leaving is None or self._stays(one))
            and one.barred <= self._now
            and self.hosts[one.host].up
        ]

    def _holds(self, worker: Worker) -> bool:
        """Whether it has the state of the last generation, as far as can be known.

        A newcomer whose source died before it had given it the state was in that generation, and has none.
        """
        behind = worker.life is Life.READY and worker.hello is not None and worker.hello.commit < self.commit
        return 0 < worker.generation == self.last and not behind

    def _stays(self, worker: Worker) -> bool:
        """Whether it is taken into one more generation, though its slot goes: it has to save, or others need it."""
        return (worker.owes and worker.leaving is not None and self._now < worker.leaving) or self._needed(worker)

    def _needed(self, worker: Worker) -> bool:
        """Whether it has to stay, though its slot goes, until somebody else has the state."""
        if not any(map(self._usable, self.hosts.values())):
            return False  # there is nobody to give it to
        stay = (Life.IN, Life.READY, Life.RETURNING)
        others = (one for one in self.workers.values() if one.life in stay and one.leaving is None)
        return self._holds(worker) and not any(map(self._holds, others))

    def _take_slots_away(self) -> None:
        for worker in self.workers.values():
            host = self.hosts[worker.host]
            here = host.listed and not host.drained and worker.index < host.slots and host.name not in self.left_out
            if here and worker.leaving is not None and not worker.dismissed:
                worker.leaving, worker.owes = None, False  # it was put back in time
            if not here and worker.leaving is None and worker.life is not Life.GONE:
                worker.leaving = self._now + self.limits.drain_timeout
                if worker.life is Life.STARTING:
                    worker.leaving = self._now

    def _replace_the_silent(self) -> None:
        for worker in self.workers.values():
            if worker.life is Life.OUT and self._now >= worker.changed + self.times.replace:
                slot = self._slot(worker)
                mine = slot is not None and slot.worker == worker.number
                if slot is not None and mine and self.hosts[worker.host].up and not self._needed(worker):
                    slot.worker = None

    def _fill(self) -> None:
        """Starts processes in free slots."""
        if self.finishing:
            return
        new = self._new_workers(self.limits.most - len(self._live()))
        for one in new:
            one.given = self._free_rank()
        # When all are known, so that each hears how many they are.
        self.acts += [Start(one.number, one.host, one.index, self._first_place(one)) for one in new]

    def _new_workers(self, room: int) -> list[Worker]:
        """A worker for each free slot, as many as there is room for."""
        new: list[Worker] = []
        for host in self.hosts.values():
            while len(host.places) < host.slots:
                host.places.append(Slot())
            if not self._usable(host) or host.not_before > self._now:
                continue
            for index, slot in enumerate(host.places[: host.slots]):
                if len(new) >= room:
                    return new
                free = slot.worker is None and slot.not_before <= self._now
                if free and slot.failures < policy.MOST_FAILURES:
                    slot.worker = self._numbers
                    worker = Worker(self._numbers, host.name, index, self._now, changed=self._now)
                    self.workers[self._numbers] = worker
                    new.append(worker)
                    self._numbers += 1
        return new

    def _free_rank(self) -> int:
        """The lowest number that no living worker has as its rank, or was started with."""
        living = [one for one in self.workers.values() if one.life is not Life.GONE]
        taken = {one.given for one in living} | {one.rank for one in living}
        return next(number for number in range(len(taken) + 1) if number not in taken)

    def _first_place(self, worker: Worker) -> Numbers:
        """What a worker is told when it starts; what it is then, it hears when it is taken in."""
        live = self._live()
        place = places_of([(one.host, one.local) for one in live])[live.index(worker)]
        return (worker.given, max(len(live), worker.given + 1), *place[2:])

    def _missing(self) -> str:
        ready = self._ready()
        need = self.limits.min_np if self.runs else self.limits.np
        which = "--min-np" if self.runs else "-np"
        slots = sum(host.slots for host in self.hosts.values() if self._usable(host))
        down = [host.name for host in self.hosts.values() if host.listed and not host.usable]
        text = (
            f"only {len(ready)} of the {need} ranks of {which} are there after {self.limits.elastic_timeout:g} s "
            f"(--elastic-timeout); the hosts that can be reached have {slots} slots"
        )
        out = [host.name for host in self.hosts.values() if host.name in self.left_out]
        text += f"; left out, because a rank failed there (--blacklist host): {', '.join(out)}" if out else ""
        return text + (f"; not reached: {', '.join(down)}" if down else "")


def places_of(workers: Sequence[tuple[str, int]]) -> list[Numbers]:
    """(rank, size, local rank, local size, cross rank, cross size) of each, by its host and its number there.

    Numbers stay, whoever else comes and goes, since a device was chosen by them. So they may have gaps, and the local
    size is one more than the largest. Who has a number that another one of its host has gets the lowest free one.

    >>> places_of([("a", 1), ("a", 3), ("b", 1)])
    [(0, 3, 1, 4, 0, 2), (1, 3, 3, 4, 0, 1), (2, 3, 1, 2, 1, 2)]
    """
    on: dict[str, dict[int, int]] = {}  # host -> local number -> rank
    waiting: list[tuple[int, str]] = []
    for rank, (host, local) in enumerate(workers):
        if on.setdefault(host, {}).setdefault(local, rank) != rank:
            waiting.append((rank, host))
    for rank, host in waiting:
        free = next(number for number in range(len(workers)) if number not in on[host])
        on[host][free] = rank
    found: dict[int, Numbers] = {}
    for host, locals_ in on.items():
        for local, rank in locals_.items():
            across = [other for other in on if local in on[other]]
            found[rank] = (rank, len(workers), local, max(locals_) + 1, across.index(host), len(across))
    return [found[rank] for rank in range(len(workers))]
