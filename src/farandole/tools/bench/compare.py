"""What became slower since another run on the same kind of machine: ratios to the same peer are compared, never times.
Pure: rows of both runs in, text out."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import plan, report
from .plan import Row, Samples
from .report import LIMITS, OURS, median

# A ratio has become worse when it grew by MIN_CHANGE, and by NOISES times the noise of both runs. Chosen by comparing
# the runs of the 2-core Arm machine that were committed one after the other: MPI, torch's DDP and plain TCP, which had
# not changed, were called slower in 2 % of their rows (5 % with limits of 5 % and twice the noise), and in 77 % of them
# when half of their time was added.
MIN_CHANGE = 0.10
NOISES = 3.0
MIN_CHANGE_OF_FEW_REPEATS = 1.0  # one repeat, as with --quick, has no noise that we know: only a doubling is reported
EFFICIENCY = "single"  # training is compared by its efficiency
FAMILIES = {"aarch64": "arm", "arm64": "arm", "x86_64": "x86", "amd64": "x86"}


def kind_of_machine(architecture: str, cores: int) -> str:
    """The name of a committed file: machines of one kind have comparable ratios.

    >>> kind_of_machine("aarch64", 2), kind_of_machine("x86_64", 16), kind_of_machine("riscv64", 1)
    ('arm-2-cores', 'x86-16-cores', 'riscv64-1-core')
    """
    family = FAMILIES.get(architecture.lower(), architecture.lower())
    return f"{family}-{cores}-core{'s' if cores != 1 else ''}"


def kind_of(facts: Mapping[str, Any]) -> str:
    """The same, for the machine in a file."""
    return kind_of_machine(facts["architecture"], facts["cores"])


@dataclass(frozen=True)
class Change:
    """One of our values and another library's, in two runs. A ratio is our value divided by theirs: less is better."""

    row: Row
    ours: str
    peer: str
    before: float
    now: float
    noise: float | None  # of both runs together; None where one of them has too few repeats

    @property
    def slower(self) -> float:
        """How much the ratio grew: 0.25 means 25 % more time compared with the same library; negative if it fell."""
        return self.now / self.before - 1

    @property
    def limit(self) -> float:
        """The growth above which it is reported."""
        return MIN_CHANGE_OF_FEW_REPEATS if self.noise is None else max(MIN_CHANGE, NOISES * self.noise)

    @property
    def is_slower(self) -> bool:
        """Whether it is reported."""
        return self.slower > self.limit

    @property
    def is_faster(self) -> bool:
        """Whether it became faster by as much."""
        return self.before / self.now - 1 > self.limit

    def cells(self) -> list[str]:
        """For a table, ratios as the other tables show them."""
        part = self.row["part"]
        known = "unknown" if self.noise is None else f"±{self.noise * 100:.0f} %"
        return [
            f"{part}: {' '.join(report.label(self.row))}",
            self.ours,
            self.peer,
            *(f"{100 / one:.0f} %" if self.peer in LIMITS else f"{1 / one:.3g}x" for one in (self.before, self.now)),
            f"{self.slower * 100:+.0f} %",
            known,
        ]


def ratio_noise(ours: Samples, peer: Samples) -> float | None:
    """The noise of a ratio. Repeats alternate, so each repeat has its own ratio, without the load that affected both.

    >>> ratio_noise([1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]), ratio_noise([1.0], [1.0])
    (0.0, None)
    """
    if len(ours) == len(peer) and all(peer):
        return report.noise([one / other for one, other in zip(ours, peer, strict=True)])
    each = report.noise(ours), report.noise(peer)
    return None if each[0] is None or each[1] is None else math.hypot(each[0], each[1])


def change(ours: str, peer: str, before: Row, now: Row) -> Change | None:
    """None if one of the runs has no time for it."""
    values = [median(row, name) for row in (before, now) for name in (ours, peer)]
    if any(value is None or value <= 0 for value in values):
        return None
    old, old_peer, new, new_peer = (float(value or 0) for value in values)
    noises = [ratio_noise(row["values"][ours], row["values"][peer]) for row in (before, now)]
    noise = None if noises[0] is None or noises[1] is None else math.hypot(noises[0], noises[1])
    return Change(now, ours, peer, old / old_peer, new / new_peer, noise)


def steadiness(found: Change, before: Row) -> float:
    """The sort key of peers; the smallest is used. Training uses efficiency, other rows the peer with least noise."""
    if found.row["part"] == "training" and found.peer == EFFICIENCY:
        return -1.0
    if found.noise is not None:
        return found.noise
    # Too few repeats now: the other run may know.
    known = ratio_noise(before["values"][found.ours], before["values"][found.peer])
    return math.inf if known is None else known


def changes(before: Sequence[Row], now: Sequence[Row]) -> Iterator[Change]:
    """Each of our values in rows of both runs, with the peer that has the least noise: a noisy peer would hide what
    became slower, or report what did not."""
    others = {plan.key(row): row for row in before}
    for row in now:
        other = others.get(plan.key(row))
        if other is None:
            continue
        # A comma: a difference of two values, or ours with another number of ranks.
        mine = [name for name in row["values"] if name.startswith(OURS) and "," not in name]
        peers = [name for name in row["values"] if not name.startswith(OURS) and ", less" not in name]
        for ours in mine:
            found = [one for peer in peers if (one := change(ours, peer, other, row)) is not None]
            if found:
                yield min(found, key=lambda one: steadiness(one, other))


@dataclass(frozen=True)
class Baseline:
    """The run to compare with: its file, its kind of machine, its rows."""

    path: Path
    kind: str
    rows: list[Row]


def missing(folder: Path, kind: str) -> str:
    """The text when there is no run to compare with."""
    path = shlex.quote(f"{folder / kind}.json")
    return (
        f"nothing to compare with: {folder} has no run of this kind of machine ({kind}).\n"
        f"To make one, on a quiet machine: python -m farandole.tools.bench --json {path}"
    )


def verdict(found: Sequence[Change], baseline: Baseline, kind: str) -> str:
    """The text: how much was compared, and what became slower."""
    rows = len({plan.key(one.row) for one in found})
    head = f"compared with {baseline.path}: {len(found)} ratios of {rows} rows that both runs have"
    lines = [head] if baseline.kind == kind else [f"{head} (that was {baseline.kind}, this is {kind})"]
    if not found:
        return f"{head}: nothing to compare"
    slower = sorted((one for one in found if one.is_slower), key=lambda one: -one.slower)
    if slower:
        titles = ["slower", "ours", "beside", "before", "now", "change", "noise"]
        lines += ["", report.text([titles, *(one.cells() for one in slower)]), ""]
        busy = max(one.row.get("busy_cores", 0.0) for one in slower)
        if busy > 0.2:
            lines.append(f"Others used up to {busy:.1f} cores meanwhile: measure these rows again on a quiet machine.")
    faster = sum(one.is_faster for one in found)
    lines.append(f"{len(slower)} became slower, {faster} faster, by more than {rule(found)}.")
    return "\n".join(lines)


def rule(found: Sequence[Change]) -> str:
    """The limit above which a change is reported, as text."""
    few = f"{MIN_CHANGE_OF_FEW_REPEATS * 100:.0f} % where too few repeats tell no noise"
    usual = f"{MIN_CHANGE * 100:.0f} % and {NOISES:.0f} times the noise of both runs"
    kinds = {one.noise is None for one in found}
    return " or ".join(text for text, there in ((usual, False in kinds), (few, True in kinds)) if there)
