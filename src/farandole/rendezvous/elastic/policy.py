# The policies of an elastic job: its times, which worker gets which rank, which one must wait or leave.
# Pure: every function returns a decision and touches nothing.
"""Policies of the elastic driver. Each is a function of what is known; driver.py keeps what is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from farandole.rendezvous.elastic.members import Numbers

REMOVED, ADDED = 1, 2  # of HostUpdateResult; both: 3
LONGEST_BACKOFF = 30.0  # seconds between two starts of a slot that fails
GOOD_LIFE = 60.0  # seconds after which a slot's earlier failures are forgotten
MAX_FAILURES = 10  # of one slot in a row; then it stays empty
MAX_FAILURES_AT_START = 3  # for each slot, before any rank has joined; then the command itself is wrong
STATES = {"T": "its process is stopped", "D": "its process waits in the kernel", "S": "its process sleeps"}
# Horovod's name for it, under which scripts import it and look for these words.
RESET_LIMIT_EXCEEDED_MESSAGE = (
    "The reset limit of {0} was exceeded: the ranks have changed again, after as many resets as --reset-limit {0} "
    "allows"
)
COOLDOWN_BOUNDS = (1, 3600)  # seconds that --blacklist-cooldown-range may name


class _Multiple:
    """A time of the table: `suspect` times a factor."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def __get__(self, times: Times, owner: type) -> float:
        return times.suspect * self._factor


@dataclass(frozen=True)
class Times:
    """The table of times of an elastic job, in seconds; all follow from one number."""

    suspect: float = 2.0  # a silent rank or host is named
    heartbeat = _Multiple(0.25)  # between two heartbeats
    evict = _Multiple(2.5)  # a silent rank or host is evicted after this time
    # A rank that waits in the kernel, or fell silent together with most others, is evicted after this time.
    give_up = _Multiple(15)
    # A rank whose agent has not heard from the launcher for this long ends its generation: the others may be about to
    # continue without it.
    revoke = _Multiple(2)
    replace = _Multiple(5)  # an evicted rank that stays silent for this long loses its slot to a new process
    # A rank that could not be reached by others waits this long, twice as long each time, before it comes back.
    excluded = _Multiple(7.5)


@dataclass(frozen=True)
class Limits:
    """What the user asked for."""

    np: int
    min_np: int
    max_np: int | None = None
    reset_limit: int | None = None
    cooldown: tuple[int, int] | None = None
    elastic_timeout: float = 600.0
    drain_timeout: float = 30.0
    leave_hosts_out: bool = False  # a host whose rank failed is left out as a whole, as in Horovod; else its slot waits

    def __post_init__(self) -> None:
        if not 1 <= self.min_np <= self.np:
            raise ValueError(f"--min-np {self.min_np}: expected a number from 1 to -np {self.np}")
        if self.max_np is not None and self.max_np < self.np:
            raise ValueError(f"--max-np {self.max_np}: expected at least -np {self.np}")
        if self.reset_limit is not None and self.reset_limit < 0:
            raise ValueError(f"--reset-limit {self.reset_limit}: expected 0 or more")
        if self.cooldown is not None:
            check_cooldown(*self.cooldown)

    @property
    def most(self) -> int:
        """The largest world."""
        return self.max_np if self.max_np is not None else 1 << 30


def check_cooldown(low: float, high: float) -> None:
    """ValueError unless these are the bounds of a cool-down."""
    if not COOLDOWN_BOUNDS[0] <= low < high <= COOLDOWN_BOUNDS[1]:
        raise ValueError(
            f"--blacklist-cooldown-range {low} {high}: expected two numbers of seconds from "
            f"{COOLDOWN_BOUNDS[0]} to {COOLDOWN_BOUNDS[1]}, the smaller one first"
        )


def backoff(failures: int) -> float:
    """Seconds until a slot is tried again after so many failures in a row.

    >>> [backoff(count) for count in (1, 2, 3, 4, 9)]
    [0.0, 1.0, 2.0, 4.0, 30.0]
    """
    return 0.0 if failures <= 1 else min(LONGEST_BACKOFF, 2.0 ** min(failures - 2, 10))


def killed_from_outside(code: int, text: str) -> bool:
    """Whether a process was killed by a signal of another program, so that a new one may succeed. The kernel's kill for
    lack of memory does not count.

    >>> killed_from_outside(137, "killed by SIGKILL"), killed_from_outside(137, "killed by the kernel (OOM)")
    (True, False)
    """
    return code in (128 + 9, 128 + 15) and "OOM" not in text


def cooldown(bounds: tuple[int, int], failures: int, draw: float) -> float:
    """Seconds that a host is out after its n-th failure; `draw` is a random number in [0, 1).

    >>> [cooldown((10, 100), count, 0.5) for count in (1, 2, 3, 9)]
    [25.0, 45.0, 85.0, 100.0]
    """
    low, high = bounds
    return min(float(high), max(float(low), low * 2.0 ** min(failures, 20) + draw * low))


@dataclass(frozen=True)
class Candidate:
    """A worker that may be in the next generation."""

    worker: int
    host: str
    commit: int
    rank: int  # in the last generation; -1: it was not in it


def choose(candidates: Iterable[Candidate], most: int) -> list[Candidate]:
    """The members of the next generation: those of the last one first, then the oldest workers."""
    return sorted(candidates, key=lambda one: (one.rank < 0, one.worker))[:most]


def arrange(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The workers in the order of their new ranks: host by host, in the order of the old ranks, new workers last.

    Rank 0 is a worker with the newest commit, and its host is the first. A worker that was not in the last generation
    cannot be rank 0, because the others may have continued without it.
    """
    order = sorted(candidates, key=lambda one: (one.rank < 0, one.rank, one.worker))
    hosts = list(dict.fromkeys(one.host for one in order))
    holders = [one for one in order if one.rank >= 0] or order
    source = max(holders, key=lambda one: one.commit)  # the first of several
    hosts.sort(key=lambda host: host != source.host)  # stable: the others keep their order
    order_of = {host: number for number, host in enumerate(hosts)}
    return sorted(order, key=lambda one: (order_of[one.host], one is not source))


def loser(complaints: Sequence[tuple[int, int]]) -> int:
    """Which rank must leave when these pairs have no link: the one with most complaints, then the highest.

    >>> loser([(0, 3), (1, 3)]), loser([(0, 1)])
    (3, 1)
    """
    counts = Counter(rank for pair in set(complaints) for rank in pair)
    return max(counts, key=lambda rank: (counts[rank], rank))


def most_fell_silent(silent: int, watched: int) -> bool:
    """Whether most of several ranks fell silent at once. Then the observer itself may have been too slow."""
    return watched > 1 and silent * 2 > watched


def numbers_of(workers: Sequence[tuple[str, int]]) -> list[Numbers]:
    """(rank, size, local rank, local size, cross rank, cross size) of each, by its host and its number there.

    A worker chose its device by its number, so it keeps the number while others join and leave. The numbers may have
    gaps, and the local size is one more than the largest. A worker whose number is taken on its host gets the lowest
    free one.

    >>> numbers_of([("a", 1), ("a", 3), ("b", 1)])
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
