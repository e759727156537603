# The result of a detector, and how detectors read numbers.
# Pure. Touches nothing.
"""A detector is a function of the environment. It returns a `ClusterRank`, or None for another launcher."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Environ = Mapping[str, str]
REMEDY = "; FARANDOLE_LAUNCHER names one launcher, FARANDOLE_LAUNCHER=none makes this a job of one process"


class ClusterError(ValueError):
    """The variables of another launcher are incomplete or contradict each other; the text says what was found."""


@dataclass(frozen=True)
class ClusterRank:
    """The rank of this process in a job that another launcher started."""

    launcher: str  # its value of FARANDOLE_LAUNCHER
    title: str  # for messages
    rank: int
    size: int
    local_rank: int
    local_size: int | None  # None: the launcher does not say; the rendezvous finds out
    hostname: str
    key: str  # the same on all ranks of this job and in no other job
    mpi: bool = False  # mpi4py would find this job
    store: str = ""  # HOST:PORT of the launcher's key-value store, if it has one

    def __post_init__(self) -> None:
        local = self.size if self.local_size is None else self.local_size
        if not (0 <= self.rank < self.size and 0 <= self.local_rank < local <= self.size):
            raise ClusterError(
                f"{self.title} says rank {self.rank} of {self.size} and local rank {self.local_rank} of "
                f"{self.local_size}, which is impossible{REMEDY}"
            )

    @property
    def one_host(self) -> bool:
        """Whether every rank is on this host."""
        return self.local_size == self.size

    @property
    def name(self) -> str:
        """The key as the name of a file."""
        return hashlib.sha256(self.key.encode()).hexdigest()[:32]


def value(environ: Environ, *names: str) -> str | None:
    """The first of these variables that is set; an empty one counts as unset."""
    for name in names:
        if text := environ.get(name, "").strip():
            return text
    return None


def rank_numbers(title: str, environ: Environ, prefix: str) -> tuple[int, int, int, int] | None:
    """Rank, size, local rank and local size in variables of this prefix; None when none is set, an error for some."""
    names = [f"{prefix}_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    if value(environ, *names) is None:
        return None
    rank, size, local_rank, local_size = (number(title, environ, name) for name in names)
    return rank, size, local_rank, local_size


def number(title: str, environ: Environ, *names: str) -> int:
    """The number in the first of these variables that is set."""
    text = value(environ, *names)
    if text is None:
        raise ClusterError(f"{title}: {' or '.join(names)} is not set, but {seen(environ, names[0])}{REMEDY}")
    if not (text.isascii() and text.isdigit()):
        name = next(name for name in names if value(environ, name))
        raise ClusterError(f"{title}: {name}={text!r} is not a number{REMEDY}")
    return int(text)


def key(title: str, environ: Environ, names: Sequence[str], needed: Sequence[str] = ()) -> str:
    """The job's key from those of these variables that are set; ClusterError without any of `needed`."""
    wanted = needed or names
    if not any(value(environ, name) for name in wanted):
        raise ClusterError(
            f"{title}: none of {', '.join(wanted)} is set, so two jobs could not be distinguished; "
            f"{seen(environ, wanted[0])}{REMEDY}"
        )
    return " ".join([title, *(f"{name}={environ[name]}" for name in names if value(environ, name))])


def seen(environ: Environ, like: str) -> str:
    """The variables of the same family as `like` that are set, for messages."""
    family = like.partition("_")[0] + "_"
    found = [f"{name}={environ[name]}" for name in sorted(environ) if name.startswith(family)]
    others = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    found += [f"{name}={environ[name]}" for name in others if name in environ]
    shown = ", ".join(text[:80] for text in found[:12]) + (f" and {len(found) - 12} more" if len(found) > 12 else "")
    return f"seen: {shown or 'nothing of that kind'}"
