"""What a run measures: sizes, repeats, ranks; the full plan and the quick one. And the format of a row.
Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .inside.library import OPERATIONS

KIB, MIB = 1 << 10, 1 << 20
PARTS = ("collectives", "halves", "training", "memory", "life", "idle", "trace", "crowd", "start", "hosts")
Samples = list[float]
Row = dict[str, Any]
MEASURED = ("values", "checked", "facts", "busy_cores")  # these do not identify a row


@dataclass(frozen=True)
class Plan:
    """Everything a part asks for."""

    ranks: tuple[int, ...]  # of collectives; at least two of them
    training_ranks: tuple[int, ...]
    cores: int
    repeats: int = 9
    operations: tuple[str, ...] = OPERATIONS
    allreduce_sizes: tuple[int, ...] = (KIB, 8 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
    other_sizes: tuple[int, ...] = (KIB, 64 * KIB, MIB, 16 * MIB)
    crowd_sizes: tuple[int, ...] = (KIB, MIB, 64 * MIB)
    half_sizes: tuple[int, ...] = (MIB, 64 * MIB)
    steps: Mapping[str, int] = field(default_factory=lambda: {"gpt": 4, "vgg": 5, "many": 20})
    lives: int = 100
    idle_seconds: float = 2.0
    in_earnest: bool = True  # False leaves out what takes minutes and only makes numbers more exact
    fresh_others: bool = True  # new tensors for the collectives other than allreduce as well
    most_calls: int = 100
    host_bytes: int = 64 * MIB
    host_shapes: tuple[tuple[int, int], ...] = ((2, 1), (2, 2), (4, 1), (4, 2))
    work_bytes: int = 40 * MIB  # one repeat of a small size ends after this many bytes, or after most_calls calls

    def count(self, size: int) -> int:
        """Calls in one repeat: enough that most of them follow a known plan, as in a training loop."""
        return max(6, min(self.most_calls, self.work_bytes // max(size, 1)))


def full(ranks: Sequence[int], cores: int, repeats: int) -> Plan:
    """The plan of a full run. Given `ranks` are those of training; collectives need at least two."""
    several = tuple(count for count in ranks if count > 1) or default_ranks(cores)
    return Plan(several, tuple(ranks) or (1, *several), cores, repeats)


def lean(ranks: Sequence[int], cores: int, repeats: int) -> Plan:
    """The same number of repeats, with fewer and shorter measurements, for a machine that is available for minutes."""
    return dataclasses.replace(
        full(ranks, cores, repeats),
        allreduce_sizes=(KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB),
        other_sizes=(64 * KIB, 16 * MIB),
        crowd_sizes=(KIB, 64 * MIB),
        half_sizes=(64 * MIB,),
        steps={"gpt": 2, "vgg": 2, "many": 6},
        idle_seconds=0.5,
        host_shapes=((2, 1), (4, 2)),
        fresh_others=False,
        most_calls=25,
        work_bytes=16 * MIB,
    )


def quick(ranks: Sequence[int], cores: int) -> Plan:
    """About a minute: checks that everything runs and that results are right. Its timings mean nothing."""
    several = tuple(count for count in ranks if count > 1) or (2,)
    return Plan(
        several,
        several,
        cores,
        repeats=1,
        allreduce_sizes=(KIB, MIB),
        other_sizes=(64 * KIB,),
        crowd_sizes=(64 * KIB,),
        half_sizes=(64 * KIB,),
        steps={"many": 2},
        lives=4,
        idle_seconds=0.2,
        in_earnest=False,
        host_bytes=MIB,
        host_shapes=((2, 1),),
        work_bytes=MIB // 4,
    )


def default_ranks(cores: int) -> tuple[int, ...]:
    """2, 4, 8 ... up to the cores.

    >>> default_ranks(2), default_ranks(16), default_ranks(1)
    ((2,), (2, 4, 8, 16), (2,))
    """
    return tuple(1 << power for power in range(1, 20) if 1 << power <= max(cores, 2))


def row(part: str, what: str, ranks: int, unit: str, values: Mapping[str, Samples], **key: Any) -> Row:
    """One line of the result: `values` has the repeats of each library, the other fields identify the row."""
    short = {name: [float(f"{value:.4g}") for value in samples] for name, samples in values.items()}
    return {"part": part, "what": what, "ranks": ranks, **key, "unit": unit, "values": short}


def key(line: Row) -> tuple[tuple[str, Any], ...]:
    """What identifies a row: everything that was not measured.

    >>> key(row("idle", "CPU", 2, "%", {"farandole": [0.1]}, checked=True))
    (('part', 'idle'), ('ranks', 2), ('unit', '%'), ('what', 'CPU'))
    """
    return tuple(sorted((name, value) for name, value in line.items() if name not in MEASURED))
