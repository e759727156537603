# The fault matrix: SIGKILL at named points of every collective, on every kind of link, of every kind of victim.
# Touches the test-only library through real processes.
"""Each cell checks that its fault occurred: the victim died by its own SIGKILL at a point that the control run passed.
Every survivor must raise PeerLost that names the victim. The time runs from the victim's last report, just before the
operation in which it dies, to the survivors' exceptions: a little longer than the detection, never shorter."""

from __future__ import annotations

import contextlib
import json
import os
import select
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jobs
import pytest
from waiting import in_time
from world import CHAOS_LIBRARY, LIBRARY

from farandole.engine.interface import Kind

RANKS = 3
HOSTS = {"shm": ["one"] * RANKS, "tcp": ["one", "two", "three"]}
KINDS = ["allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier", "join", "send", "receive"]
PHASES = ["enqueue", "negotiate", "pack", "send", "recv", "reduce", "unpack", "complete"]
VICTIMS = [0, 1, 2]  # the first (it orders negotiation), the middle, the last
LONG = "CHAOS_N" in os.environ  # `make chaos`
FEWEST_CELLS = 100 if LONG else 40
DETECTION_P99_S = 0.250
TOGETHER = 2  # jobs at a time
EVERY = max(1, 3 // int(os.environ["CHAOS_N"])) if LONG else 8  # all cells with CHAOS_N=3 and more
KILLED = 128 + 9

OPERATIONS = """
def operate(kind, name):
    big = np.ones((3 * 50_000,), np.float32)
    if kind == "allreduce": hvd.allreduce(big, op=hvd.Sum, name=name)
    if kind == "allgather": hvd.allgather(big, name=name)
    if kind == "broadcast": hvd.broadcast(big, 1, name=name)
    if kind == "alltoall":  # of a plan: so large that other ranks of the host write into the results
        hvd.alltoall(np.ones((3 * 400_000,), np.float32) if name == "x" else big, name=name)
    if kind == "reducescatter": hvd.reducescatter(big, op=hvd.Sum, name=name)
    if kind == "barrier": hvd.barrier()
    if kind == "join": hvd.join()
    if kind in ("send", "receive"):  # round in a ring
        sent = hvd.isend(big, (rank + 1) % 3)
        hvd.recv(np.empty_like(big), (rank - 1) % 3)
        hvd.synchronize(sent)
hvd.init()
"""

CONTROL = (
    OPERATIONS
    + """
fired = []
for planned in (False, True):
    for kind in KINDS:
        for turn in range(5 if planned else 2):
            operate(kind, "x" if planned else f"t{turn}")
        for phase in PHASES:
            engine().chaos_set(f"{kind}.{phase}", "off")
            engine().chaos_set(f"{kind}.{phase}", "delay:0")
        operate(kind, "x" if planned else "new")
        hvd.barrier()
        fired += [[kind, phase, planned] for phase in PHASES if engine().chaos_fired(f"{kind}.{phase}")]
report(fired=fired, in_place=engine().counter("in_place_bytes"))
hvd.shutdown()
"""
)

CELL = (
    OPERATIONS
    + """
try:  # a survivor may still be busy with the last repetition when the victim is done with it
    for turn in range(5 if PLANNED else 2):
        operate(KIND, "x" if PLANNED else f"t{turn}")  # nothing else in between: that would end the plan
    if rank == VICTIM:
        for _ in range(2 * FORKED):
            if os.fork() == 0:
                while True: signal.pause()
        engine().chaos_set(f"{KIND}.{PHASE}", "kill")
        report(at=time.monotonic())
    operate(KIND, "x" if PLANNED else "new")
    operate("barrier", None)  # if the victim dies after the others are done, they notice it here
    report(at=time.monotonic(), error="none")
except HorovodInternalError as error:
    report(at=time.monotonic(), error=type(error).__name__, rank=getattr(error, "rank", None), text=str(error))
hvd.shutdown()
"""
)


@dataclass(frozen=True)
class Cell:
    kind: str
    phase: str
    link: str
    victim: int
    planned: bool
    forked: bool = False

    def body(self) -> str:
        values = f"KIND, PHASE, VICTIM = {self.kind!r}, {self.phase!r}, {self.victim}\n"
        return values + f"PLANNED, FORKED = {self.planned}, {self.forked}\n" + CELL


@dataclass
class Record:
    cell: Cell
    problem: str
    detection_s: list[float]


def control(link: str) -> set[tuple[str, str, int, bool]]:
    """Which (kind, phase, rank, planned) a job without faults passes. It must also end with success."""
    body = f"KINDS, PHASES = {KINDS!r}, {PHASES!r}\n" + CONTROL
    env = jobs.environment_of_chaos(CHAOS_LIBRARY)
    found = jobs.run(body, RANKS, HOSTS[link], env=env)
    assert all((found[rank]["in_place"] > 0) == (link == "shm") for rank in range(RANKS)), found
    return {(kind, phase, rank, planned) for rank in range(RANKS) for kind, phase, planned in found[rank]["fired"]}


def cells() -> list[Cell]:
    """Every point that a job passes, spread over planned and negotiated steps."""
    table: list[Cell] = []
    for link in HOSTS:
        passed = control(link)
        for kind in KINDS:
            for phase in PHASES:
                for victim in VICTIMS:
                    ways = [planned for planned in (False, True) if (kind, phase, victim, planned) in passed]
                    if ways:
                        table.append(Cell(kind, phase, link, victim, ways[len(table) // 2 % len(ways)]))
    return table


def run_cell(cell: Cell) -> Record:
    with jobs.start(cell.body(), RANKS, HOSTS[cell.link], jobs.environment_of_chaos(CHAOS_LIBRARY)) as job:
        descriptor = os.pidfd_open(job.pids[cell.victim])
        try:
            dead, _, _ = select.select([descriptor], [], [], 30.0)
        finally:
            os.close(descriptor)
        survivors = [rank for rank in range(RANKS) if rank != cell.victim]
        with contextlib.suppress(TimeoutError):  # a rank that has not reported by then is stuck
            job.wait(30)
        last_words = jobs.results(job, cell.victim)
        reports: dict[int, Any] = {rank: jobs.last_result(job, rank) for rank in survivors}
        problem = ""
        if not dead or not last_words or job.codes[cell.victim] != KILLED:
            problem = f"did not fire: exit codes {job.codes} {job.stdout(cell.victim)} {job.stderr(cell.victim)[-300:]}"
        for rank, found in reports.items():
            if found is None or found["error"] != "PeerLost" or found["rank"] != cell.victim or job.codes[rank] != 0:
                problem += f" rank {rank}: {found}, exit code {job.codes[rank]}, {job.stderr(rank)[-600:]}"
        moments = [found["at"] - last_words[-1]["at"] for found in reports.values() if found and last_words]
        return Record(cell, problem, moments)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


@pytest.mark.timeout(900)
@pytest.mark.chaos
@pytest.mark.skipif(not (LIBRARY or CHAOS_LIBRARY.exists()), reason="the library with failpoints is not built")
def test_killing_any_rank_at_any_point_is_seen_by_all_survivors(record_property: Any) -> None:
    assert {kind.name.lower() for kind in Kind} >= set(KINDS)
    every = cells()
    assert len(every) >= FEWEST_CELLS, f"only {len(every)} places: {every}"
    chosen = every[:: min(EVERY, len(every) // FEWEST_CELLS)]
    chosen = [replace(cell, forked=number % 4 == 0) for number, cell in enumerate(chosen)]
    with ThreadPoolExecutor(TOGETHER, thread_name_prefix="cell") as pool:
        records = list(pool.map(run_cell, chosen))
    failed = [f"{record.cell}: {record.problem}" for record in records if record.problem]
    times = [moment for record in records for moment in record.detection_s]
    summary = {
        "cells": len(records),
        "fired": sum("did not fire" not in record.problem for record in records),
        "failed": len(failed),
        "with children": sum(record.cell.forked for record in records),
        "detection p50 ms": round(1000 * percentile(times, 0.5), 1),
        "detection p99 ms": round(1000 * percentile(times, 0.99), 1),
        "detection max ms": round(1000 * max(times), 1),
    }
    record_property("faults", json.dumps(summary))
    print(json.dumps(summary))
    assert not failed, f"{len(failed)} of {len(records)} cells:\n" + "\n".join(failed[:20])
    assert len(records) >= FEWEST_CELLS
    assert summary["with children"] * 4 >= len(records)
    in_time(percentile(times, 0.99), DETECTION_P99_S, f"detecting a death (p99 of {summary})")
