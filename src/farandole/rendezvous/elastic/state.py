# What is known of an elastic job: hosts with slots, the workers in them, what has run, and what follows from it.
# Pure data and questions about it; the driver and its parts change it.
"""`JobState` is shared by the parts of the driver: slots.py, generations.py, end.py and driver.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from farandole.rendezvous.elastic.members import Action, Host, Say, Slot, Status, Worker
from farandole.rendezvous.elastic.policy import Candidate, Limits, Times


@dataclass
class JobState:
    """See the module."""

    limits: Limits
    times: Times = field(default_factory=Times)
    hosts: dict[str, Host] = field(default_factory=dict)  # in order of seniority
    workers: dict[int, Worker] = field(default_factory=dict)
    left_out: dict[str, float] = field(
        default_factory=dict
    )  # hosts where a rank failed, until when; inf: for the whole job
    actions: list[Action] = field(default_factory=list)  # what the launcher must do
    now: float = 0.0
    runs: int = 0  # generations that have run
    last: int = 0  # the newest generation that has run
    commit: int = 0  # the number of its last commit when it began
    worker_of_rank: dict[int, int] = field(default_factory=dict)  # in that generation
    finishing: bool = False  # a worker has ended with code 0: no other worker is started
    drained: bool = False  # a host had to leave
    early: str = ""  # a worker ended with code 0 before the first generation began
    below_since: float | None = None  # since when too few workers are ready

    @property
    def members(self) -> list[Worker]:
        """The members of the generation that runs, by rank."""
        found = [one for one in self.workers.values() if one.status is Status.MEMBER]
        return sorted(found, key=lambda one: one.rank)

    def say(self, text: str) -> None:
        """Tells the user."""
        self.actions.append(Say(text))

    def name(self, worker: Worker) -> str:
        """A worker in words."""
        who = (
            f"rank {worker.rank}" if worker.generation or worker.status is Status.MEMBER else f"worker {worker.number}"
        )
        pid = f"process {worker.hello.pid} " if worker.hello is not None else ""
        return f"{who} ({pid}on {worker.host})"

    def usable(self, host: Host) -> bool:
        """Whether ranks may start and run on this host."""
        return host.usable and host.name not in self.left_out

    def may_continue(self, worker: Worker) -> bool:
        """Whether this worker may be in the next generation."""
        if worker.dismissed or (worker.leaving is not None and not self.stays(worker)):
            return False
        if self.finishing and worker.generation == 0:
            return False  # the other workers have finished
        return self.own_slot(worker) is not None

    def slot(self, worker: Worker) -> Slot | None:
        """The slot in which it was started, whoever has it now."""
        host = self.hosts.get(worker.host)
        return host.slots[worker.index] if host is not None and worker.index < len(host.slots) else None

    def own_slot(self, worker: Worker) -> Slot | None:
        """Its slot; None when the slot is free or has another worker."""
        slot = self.slot(worker)
        return slot if slot is not None and slot.worker == worker.number else None

    def live(self) -> list[Worker]:
        """The workers that count towards the largest number of workers."""
        return [
            one
            for one in self.workers.values()
            if one.status is not Status.ENDED and one.leaving is None and not one.dismissed and self.own_slot(one)
        ]

    def ready(self) -> list[Candidate]:
        """The workers that may be in a generation that begins now."""
        return [
            Candidate(one.number, one.host, one.hello.commit, one.rank if self.holds(one) else -1)
            for one in self.workers.values()
            if one.status is Status.READY
            and one.hello is not None
            and (one.leaving is None or self.stays(one))
            and one.excluded_until <= self.now
            and self.hosts[one.host].up
        ]

    def holds(self, worker: Worker) -> bool:
        """Whether it has the training state of the last generation, as far as the launcher can know.

        A new worker whose source died before the state was sent was in that generation, but does not have it.
        """
        behind = worker.status is Status.READY and worker.hello is not None and worker.hello.commit < self.commit
        return 0 < worker.generation == self.last and not behind

    def stays(self, worker: Worker) -> bool:
        """Whether it may be a member once more, although it loses its slot: it must save, or others need it."""
        return (worker.must_save and worker.leaving is not None and self.now < worker.leaving) or self.needed(worker)

    def needed(self, worker: Worker) -> bool:
        """Whether it must stay, although it loses its slot, until another worker has the training state."""
        if not any(map(self.usable, self.hosts.values())):
            return False  # no other worker can take the state
        stay = (Status.MEMBER, Status.READY, Status.RETURNING)
        others = (one for one in self.workers.values() if one.status in stay and one.leaving is None)
        return self.holds(worker) and not any(map(self.holds, others))
