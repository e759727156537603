# The types of the elastic driver: workers and their status, slots, hosts, and the actions for the launcher.
# Pure data. Touches rendezvous.messages.
"""A worker is one process; a slot is the right to run one process on a host. Both outlive generations."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from farandole.rendezvous.messages import Hello

# rank, size, local rank, local size, cross rank, cross size
Numbers = tuple[int, int, int, int, int, int]


class Status(Enum):
    """What a worker does now."""

    STARTING = "starting"  # its process runs; it has not asked for a generation yet
    READY = "ready"  # it has sent Hello and waits
    MEMBER = "member"  # of the generation that runs, or is being made
    RETURNING = "returning"  # it has left a generation and will send Hello
    OUT = "out"  # evicted, or its connection ended: it may still run, but no rank waits for it
    LEFT = "left"  # it has left for good and will end
    ENDED = "ended"  # its process has ended


@dataclass
class Worker:
    """One process, from its start to its end."""

    number: int
    host: str
    index: int
    started: float
    status: Status = Status.STARTING
    member: int | None = None  # its connection
    hello: Hello | None = None
    rank: int = -1  # in its last generation
    generation: int = 0  # its last generation that ran; 0: none
    changed: float = 0.0  # when its status last changed
    leaving: float | None = None  # its slot is being taken away; it must have left by this time
    must_save: bool = False  # it was asked to save before it leaves, and has not saved yet
    excluded_until: float = 0.0  # until this time it cannot be a member
    complaints: int = 0  # how often it was excluded because other ranks could not reach it
    dismissed: bool = False  # it was asked to leave, so its end is no failure
    first_rank: int = -1  # the rank in its variables when it started; no other worker gets it while this one runs
    local: int = -1  # its number on its host, until it ends

    def __post_init__(self) -> None:
        self.local = self.index

    def become(self, status: Status, now: float) -> None:
        """Changes the status."""
        self.status = status
        self.changed = now


@dataclass
class Slot:
    """The right to run one process on a host."""

    worker: int | None = None
    failures: int = 0
    not_before: float = 0.0


@dataclass
class Host:
    """A host that discovery has listed."""

    name: str
    slot_count: int
    listed: bool = True
    up: bool = True  # its agent can be reached
    drained: bool = False  # its agent got SIGTERM, for example from a scheduler that needs the host
    slots: list[Slot] = field(default_factory=list)
    not_before: float = 0.0

    @property
    def usable(self) -> bool:
        """Whether workers may be started there."""
        return self.listed and self.up and not self.drained


# What the launcher must do.


@dataclass(frozen=True)
class Start:
    """Start a process in this slot."""

    worker: int
    host: str
    index: int
    numbers: Numbers  # for its variables
    newcomer: bool  # a generation has run already


@dataclass(frozen=True)
class Kill:
    """End this process."""

    worker: int


@dataclass(frozen=True)
class Drop:
    """Close this connection."""

    member: int


@dataclass(frozen=True)
class Say:
    """Tell the user."""

    text: str


@dataclass(frozen=True)
class Over:
    """The job has ended; `failed` with the reason."""

    failed: bool
    text: str


Action = Start | Kill | Drop | Say | Over
