# The measurements of a fault in an elastic job: detection and recovery times, repeated steps; and their summary.
# Touches /proc, and the events of tests/ranks/elastic.py.
"""Ranks are named by their worker number, because process ids of different hosts in tests/bed are not related."""

from __future__ import annotations

import math
import os
import select
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("ranks", "")]

from elastic import ElasticJob  # noqa: E402

LIMITS = {"detect": 0.1, "recover": 1.0, "replace beside imports": 3.0, "evict": 5.5}
# Parts with their own limits: detection takes longer between hosts, and longest if their network is cut.
LIMITS_OF = {
    "hosts": {**LIMITS, "detect": 0.25},
    "partitions": {"recover": 6.0, "replace": 3.0},
    "nested": {"recover": 2.0},  # as many processes at once as there were deaths take as long as the machine needs
    "saves": {},
}


@dataclass
class Record:
    """One fault and its effects, in seconds."""

    what: str
    fired: bool = True
    detect: list[float] = field(default_factory=list)
    latest: list[float] = field(default_factory=list)  # like `detect`, from a moment that was surely before the death
    recover: float = math.nan
    replace: float = math.nan
    imports: float = math.nan  # the part of it in which a new process starts, until its `init`
    redone: int = 0  # steps that a survivor had done and does again
    note: str = ""


def wait_for_end(pid: int, seconds: float) -> float | None:
    """The time at which a process ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return time.monotonic()
    try:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        return time.monotonic() if ready else None
    finally:
        os.close(descriptor)


def follow(
    job: ElasticJob,
    record: Record,
    full: dict[int, dict[str, Any]],
    moment: float,
    lost: set[int],
    size: int,
    set_at: float = math.nan,
) -> None:
    """Waits until the survivors continue and the world is full again, and records the times; `lost` are ranks.

    `moment`: when the death was seen from outside, a little late where cores are busy; `armed`: surely before it.
    """
    generation = full[0]["generation"]
    since = moment - 0.05 if math.isnan(set_at) else set_at
    survivors = {event["worker"] for rank, event in full.items() if rank not in lost}
    again = job.world(size, generation, 60)
    for worker in survivors:
        knew = [e for e in job.of(worker, "lost", by="worker") if e["t"] > since]
        record.detect += [max(0.0, knew[0]["t"] - moment)] if knew else []
        record.latest += [knew[0]["t"] - set_at] if knew and not math.isnan(set_at) else []
        after = [e["step"] for e in job.of(worker, "world", by="worker") if e["generation"] > generation]
        if knew and after:
            record.redone = max(record.redone, knew[0]["step"] - after[0])
    assert record.redone <= 1, f"{record.redone} steps are done again"
    worlds = [
        [e["t"] for e in job.of(worker, "world", by="worker") if e["generation"] > generation] for worker in survivors
    ]
    record.recover = max((times[0] for times in worlds if times), default=math.nan) - moment
    record.replace = max(event["t"] for event in again.values()) - moment
    workers = {event["worker"] for event in again.values()}
    assert survivors <= workers, "a survivor was started again"
    new = [job.import_seconds(worker, by="worker") for worker in workers - survivors]
    record.imports = max(new, default=math.nan)


def p99(values: list[float]) -> float:
    known = sorted(value for value in values if not math.isnan(value))
    return known[max(0, math.ceil(0.99 * len(known)) - 1)] if known else math.nan


def plain(record: Record) -> dict[str, Any]:
    """The record for JSON. Values that were not measured are null."""
    found = asdict(record)
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in found.items()}


def steal() -> float:
    """Seconds that this machine's processors worked for other virtual machines since its start."""
    return int(Path("/proc/stat").read_text().split()[8]) / os.sysconf("SC_CLK_TCK")


def summary(name: str, records: list[Record]) -> dict[str, Any]:
    detect = [value for record in records for value in record.detect]
    found: dict[str, Any] = {"faults": len(records)}
    for what, values in (
        ("detect", detect),
        ("detect at the latest", [value for record in records for value in record.latest]),
        ("recover", [record.recover for record in records]),
        ("replace", [record.replace for record in records]),
        ("replace beside imports", [record.replace - record.imports for record in records]),
    ):
        known = [value for value in values if not math.isnan(value)]
        if known:
            found[what] = {"p99": round(p99(known), 4), "max": round(max(known), 4), "count": len(known)}
    shown = "  ".join(
        f"{what} p99 {one['p99']:.3f} max {one['max']:.3f} s" for what, one in found.items() if what != "faults"
    )
    print(f"{name:<11} {len(records):4d} faults  {shown}", flush=True)
    found["redone"] = max(record.redone for record in records)
    limits = LIMITS_OF.get(name, LIMITS)
    found["over"] = [what for what in sorted(found.keys() & limits.keys()) if found[what]["p99"] > limits[what]]
    if found["over"]:
        print(f"{name:<11} over the limit: " + ", ".join(f"{what} {limits[what]} s" for what in found["over"]))
    return found
