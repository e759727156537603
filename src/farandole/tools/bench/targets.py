"""The targets, and whether a run meets them.
Pure: rows in, verdicts out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .plan import KIB, MIB, Row
from .report import median, size_name

CASES_TWO = {"gpt": 0.96, "vgg": 0.88, "many": 0.92}


@dataclass(frozen=True)
class Verdict:
    """One line of the table. `met` is None where nothing was measured."""

    target: str
    measured: str
    met: bool | None

    def cells(self) -> list[str]:
        """For a table."""
        return [self.target, self.measured or "-", {True: "met", False: "NOT MET", None: "not measured"}[self.met]]


class Table:
    """Finds rows."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def find(self, **key: Any) -> Row | None:
        """The row with these values."""
        return next((row for row in self._rows if all(row.get(name) == value for name, value in key.items())), None)

    def value(self, name: str, **key: Any) -> float | None:
        """The median of a library in that row."""
        found = self.find(**key)
        return median(found, name) if found else None


def at_least(target: str, value: float | None, limit: float, form: str = "{:.1f}") -> Verdict:
    """Met when the value reaches the limit."""
    return Verdict(target, "" if value is None else form.format(value), None if value is None else value >= limit)


def at_most(target: str, value: float | None, limit: float, form: str = "{:.3g}") -> Verdict:
    """Met when it stays below."""
    return Verdict(target, "" if value is None else form.format(value), None if value is None else value <= limit)


def ratio(above: float | None, below: float | None) -> float | None:
    """The ratio; None when one of them was not measured."""
    return above / below if above is not None and below else None


def compared_with(form: str, name: str, limit: float | None) -> str:
    """The form, and what the limit named so would read in it."""
    return form if limit is None else f"{form} ({name}: {form.format(limit)})"


def allreduce(table: Table, ranks: int) -> Callable[[int, str], float | None]:
    """Looks up allreduce in place on a tensor that is used again."""

    def value(size: int, name: str) -> float | None:
        return table.value(name, part="collectives", what="allreduce", ranks=ranks, bytes=size, kind="reused")

    return value


def two_ranks(table: Table) -> Iterator[Verdict]:
    """Two ranks on a machine of two cores."""
    value = allreduce(table, 2)
    big, middle, small = 64 * MIB, MIB, KIB
    yield at_least("allreduce 64 MiB: >= 5 x Gloo", ratio(value(big, "Gloo"), value(big, "farandole")), 5, "{:.1f} x")
    share = ratio(value(big, "memcpy"), value(big, "farandole"))
    yield at_least("allreduce 64 MiB: >= 0.5 x memcpy", share, 0.5, "{:.2f} x")
    times = ratio(value(middle, "Gloo"), value(middle, "farandole"))
    yield at_least("allreduce 1 MiB: >= 12 x Gloo", times, 12, "{:.1f} x")
    latency = value(small, "farandole")
    yield at_most("allreduce 1 KiB: <= 30 us", latency and latency * 1e6, 30, "{:.1f} us")
    yield at_least("allreduce 1 KiB: >= 20 x Gloo", ratio(value(small, "Gloo"), latency), 20, "{:.1f} x")
    for case, limit in CASES_TWO.items():
        yield from efficiency(table, case, 2, limit)


def efficiency(table: Table, case: str, ranks: int, limit: float | None) -> Iterator[Verdict]:
    """Training, compared with pinned single processes and with DDP."""
    key = {"part": "training", "what": case, "ranks": ranks}
    ours = table.value("farandole", **key)
    if limit is not None:
        share = ratio(table.value("single", **key), ours)
        limits = {name: table.value(name, **key) for name in ("in step, one copy", "single, in step")}
        name = next((name for name, value in limits.items() if value), "single, in step")
        least = ratio(table.value("single", **key), limits[name])
        form = compared_with("{:.1f} %", name, least and least * 100)
        target = f"{case}, {ranks} ranks: efficiency >= {limit * 100:.0f} %"
        yield at_least(target, share and share * 100, limit * 100, form)
    times = ratio(table.value("DDP on Gloo", **key), ours)
    yield at_least(f"{case}, {ranks} ranks: ahead of DDP on Gloo", times, 1.0, "{:.2f} x")


def sixteen_ranks(table: Table) -> Iterator[Verdict]:
    """Sixteen ranks on sixteen cores or more."""
    value = allreduce(table, 16)
    big = 64 * MIB
    ours = value(big, "farandole")
    peers, share = ratio(value(big, "Gloo"), ours), ratio(value(big, "copy by all"), ours)
    met = None if peers is None and share is None else (peers or 0) >= 5 or (share or 0) >= 0.6
    text = "" if met is None else f"{peers or 0:.1f} x, {share or 0:.2f} x"
    yield Verdict("allreduce 64 MiB, 16 ranks: >= 5 x Gloo or >= 0.6 x a copy by 16", text, met)
    latency = value(KIB, "farandole")
    yield at_most("allreduce 1 KiB, 16 ranks: <= 150 us", latency and latency * 1e6, 150, "{:.1f} us")
    for ranks in (2, 4, 8, 16):
        for case in CASES_TWO:
            yield from efficiency(table, case, ranks, 0.9 if case == "gpt" and ranks == 8 else None)


def half_floats(table: Table, arm: bool) -> Iterator[Verdict]:
    """By bytes; the limit is the kernel's own rate."""
    limit = 0.5 if arm else 0.8
    key: dict[str, Any] = {"part": "halves", "bytes": 64 * MIB}
    whole = table.value("farandole", dtype="float32", **key)
    for dtype in ("float16", "bfloat16"):
        share = ratio(whole, table.value("farandole", dtype=dtype, **key))
        kernel = ratio(
            table.value("kernel alone", dtype="float32", **key), table.value("kernel alone", dtype=dtype, **key)
        )
        form = "{:.2f} x" + (f" (kernel alone: {kernel:.2f} x)" if kernel else "")
        yield at_least(f"{dtype}: >= {limit} x the float32 rate", share, limit, form)


def other_collectives(table: Table, ranks: int) -> Iterator[Verdict]:
    """The four others at 16 MiB."""
    for what in ("allgather", "broadcast", "reducescatter", "alltoall"):
        key = {"part": "collectives", "what": what, "ranks": ranks, "bytes": 16 * MIB, "kind": "reused"}
        gloo = table.value("Gloo", **key)
        form = compared_with("{:.1f} x", "copy by all", ratio(gloo, table.value("copy by all", **key)))
        target = f"{what} {size_name(16 * MIB)}, {ranks} ranks: >= 4 x Gloo"
        yield at_least(target, ratio(gloo, table.value("farandole", **key)), 4, form)


def between_hosts(table: Table) -> Iterator[Verdict]:
    """Each shape and algorithm against plain TCP that carries as much both ways."""
    for hosts, per_host in ((2, 1), (2, 2), (4, 1), (4, 2)):
        key = {"part": "hosts", "hosts": hosts, "ranks": hosts * per_host, "bytes": 64 * MIB}
        for algorithm in ("direct", "ring"):
            plain = table.value("plain TCP, both ways", **key)
            share = ratio(plain, table.value(f"farandole {algorithm}", **key))
            at_once = ratio(plain, table.value("plain TCP, all at once", **key)) if algorithm == "direct" else None
            form = compared_with("{:.1f} %", "plain TCP, all at once", at_once and at_once * 100)
            target = f"{hosts} hosts x {per_host} at 1 Gbit/s, {algorithm}: >= 96 % of plain TCP"
            yield at_least(target, share and share * 100, 96, form)


def the_rest(table: Table, cores: int) -> Iterator[Verdict]:
    """Idle, life, memory, more ranks than cores."""
    yield at_most("idle: <= 0.2 % CPU per rank", table.value("farandole", part="idle", unit="%"), 0.2, "{:.3f} %")
    wakes = table.value("farandole", part="idle", unit="/s")
    yield at_most("idle: <= 5 wake-ups a second per rank", wakes, 5, "{:.1f}")
    spent = table.value("farandole", part="life")
    yield at_most("init and shutdown: <= 15 ms", spent and spent * 1e3, 15, "{:.1f} ms")
    found = table.find(part="memory")
    ours, single = (median(found, "farandole"), median(found, "single")) if found else (None, None)
    allowed = 0.0 if found is None else found["bytes"] / MIB + 32
    extra = None if ours is None or single is None else (ours - single) / MIB
    yield at_most("extra memory: <= 1 x gradients + 32 MiB", extra, allowed, f"{{:.0f}} MiB of {allowed:.0f}")
    fit = max(2, cores)
    key = {"part": "crowd", "bytes": 64 * MIB}
    crowded = table.value("farandole", **key)
    kept = ratio(table.value(f"farandole, {fit} ranks", **key), crowded)
    yield at_least(f"{2 * fit} ranks on {cores} cores: >= 0.3 x the rate of {fit}", kept, 0.3, "{:.2f} x")
    times = ratio(table.value("Gloo", **key), crowded)
    yield at_least(f"{2 * fit} ranks on {cores} cores: >= 3 x Gloo", times, 3, "{:.1f} x")


def verdicts(rows: Sequence[Row], cores: int, architecture: str) -> list[Verdict]:
    """Every target that applies to this machine."""
    table = Table(rows)
    found = list(sixteen_ranks(table)) if cores >= 16 else list(two_ranks(table))
    found += half_floats(table, architecture in ("aarch64", "arm64"))
    found += other_collectives(table, 16 if cores >= 16 else 2)
    found += between_hosts(table)
    found += the_rest(table, cores)
    return found
