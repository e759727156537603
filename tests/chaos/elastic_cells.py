# Row 1 of the table of faults: SIGKILL at named points of every collective, on one host and between hosts.
# Touches the real launcher through tests/ranks/elastic.py, the library with failpoints, and tests/bed.
"""A job replaces its lost rank after each cell, and continues with the next. The test checks that the process died."""

from __future__ import annotations

import json
import os
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from elastic_records import Record, follow, wait_for_end

from elastic import PROGRAM, ElasticJob, within  # isort: skip

KINDS = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier", "join", "send", "receive")
PHASES = ("enqueue", "negotiate", "pack", "send", "recv", "reduce", "unpack", "complete")
RANKS = 3
# Names of this host: ranks with different host names use TCP.
LINKS = {"shm": f"localhost:{RANKS}", "tcp": f"localhost:1,127.0.0.1:1,{socket.gethostname()}:1"}
CHAOS = Path(__file__).parents[2] / "src" / "farandole" / "engine" / "_native" / "libfarandole_chaos.so"
ENVIRONMENT = {"FARANDOLE_LIBRARY": str(CHAOS), "JOB_SECONDS": "7200"}

Cell: TypeAlias = tuple[str, str, int, bool]  # kind, phase, rank, whether the operation is planned

# A cell: all ranks run one operation, and one rank is killed at a point of it.
OPERATE = """
def operate(kind, name):
    big = np.ones((12_000,), np.float32)
    if kind == "allreduce": hvd.allreduce(big, op=hvd.Sum, name=name)
    if kind == "allgather": hvd.allgather(big, name=name)
    if kind == "broadcast": hvd.broadcast(big, hvd.size() - 1, name=name)
    if kind == "alltoall":  # of a plan: so large that neighbours write into the results
        hvd.alltoall(np.ones((6 * 200_000,), np.float32) if name == "x" else big, name=name)
    if kind == "reducescatter": hvd.reducescatter(big, op=hvd.Sum, name=name)
    if kind == "barrier": hvd.barrier()
    if kind == "join": hvd.join()
    if kind in ("send", "receive") and hvd.size() > 1:
        sent = hvd.isend(big, (hvd.rank() + 1) % hvd.size())
        hvd.recv(np.empty_like(big), (hvd.rank() - 1) % hvd.size())
        hvd.synchronize(sent)

last = 0
def cell():
    global last
    text = open(os.environ["JOB_ORDERS"]).read()
    order = json.loads(text) if text.startswith("{") else {"number": 0}
    # A newcomer has done none of them: it learns from the others which was the last.
    number, last = map(int, hvd.allreduce(np.array([float(order["number"]), float(last)]), op=hvd.Max, name="cell"))
    if number <= last:
        return
    last = number
    if order["number"] != number:
        order = json.loads(open(os.environ["JOB_ORDERS"]).read())
    for turn in range(4):
        operate(order["kind"], "x" if order["planned"] else f"t{turn}")
    victim = order["worker"] == int(os.environ["FARANDOLE_WORKER"])
    point = f"{order['kind']}.{order['phase']}"
    if victim:
        for _ in range(2 * order["forked"]):
            if os.fork() == 0:
                time.sleep(60)  # sleep: until it is killed
                os._exit(0)
        say("armed", number=number)
        runtime.world.engine.chaos_set(point, "kill")
    operate(order["kind"], "x" if order["planned"] else "new")
    hvd.barrier()
    if victim:
        runtime.world.engine.chaos_set(point, "off")
        say("missed", number=number)
"""
CELLS = PROGRAM.replace("def pause():", OPERATE + "\ndef pause():\n    cell()\n    return\n\ndef nothing():", 1)


def table(draw: random.Random) -> list[Cell]:
    """All cells, in an order that depends on the seed."""
    found = [
        (kind, phase, victim, planned)
        for kind in KINDS
        for phase in PHASES
        for victim in range(RANKS)
        for planned in (False, True)
    ]
    draw.shuffle(found)
    return found


def cells(count: int, seed: int, folder: Path) -> list[Record]:
    """Kills ranks of every kind on this host: half of them use shared memory, half use TCP."""
    draw = random.Random(seed)
    records: list[Record] = []
    for link, hosts in LINKS.items():
        scratch = folder / f"cells-{link}"
        scratch.mkdir()
        arguments = ["-np", str(RANKS), "--min-np", "1", "-H", hosts]
        with ElasticJob(arguments, scratch, ENVIRONMENT, program=CELLS) as job:
            wanted = count // 2 if link == "shm" else count - count // 2
            records += kills(job, link, wanted, draw, lambda event: int(event["pid"]))
            job.finish()
    return records


def cells_between_hosts(count: int, seed: int, folder: Path) -> list[Record]:
    """Like `cells`, but each rank has its own host, with its own network and processes, and agents over ssh."""
    import bed

    scratch = folder / "cells-hosts"
    scratch.mkdir()
    with bed.hosts(RANKS, ssh=True, visible=[scratch]) as found:
        names = ",".join(f"{host.name}:1" for host in found)
        arguments = ["-np", str(RANKS), "--min-np", "1", "-H", names]
        hosts = {host.name: host for host in found}
        with ElasticJob(
            arguments, scratch, {**ENVIRONMENT, "PATH": bed.PATH}, program=CELLS, start=within(found[0])
        ) as job:
            records = kills(
                job, "hosts", count, random.Random(seed), lambda event: hosts[event["host"]].outside(event["pid"])
            )
            job.finish()
    return records


def kills(
    job: ElasticJob, link: str, wanted: int, draw: random.Random, pid_of: Callable[[dict[str, Any]], int]
) -> list[Record]:
    """Runs `count` cells in one job. `pid_of`: the process id that the driver uses for a rank."""
    records: list[Record] = []
    full = job.world(RANKS, seconds=60)
    for number, (kind, phase, rank, planned) in enumerate(table(draw), 1):
        if len(records) == wanted:
            break
        forked = int(draw.random() < 0.25)
        victim = full[rank]["worker"]
        pid = pid_of(full[rank])
        order = {"number": number, "kind": kind, "phase": phase, "worker": victim, "planned": planned, "forked": forked}
        job.orders.with_suffix(".new").write_text(json.dumps(order))
        os.replace(job.orders.with_suffix(".new"), job.orders)
        record = Record(f"{link} {kind}.{phase} rank {rank}" + " with data loaders" * forked)
        moment = None
        deadline = time.monotonic() + 20
        while moment is None and not any(e.get("number") == number for e in job.of(victim, "missed", by="worker")):
            moment = wait_for_end(pid, 0.05)
            assert time.monotonic() < deadline, f"{record.what}: neither died nor passed\n{job.tail()}"
        if moment is None:
            continue  # this rank does not reach this point
        [armed] = job.wait(  # the launcher may print it a moment after the death was detected
            lambda: [e["t"] for e in job.of(victim, "armed", by="worker") if e["number"] == number]  # noqa: B023
        )
        follow(job, record, full, moment, {rank}, RANKS, armed)
        records.append(record)
        if len(records) % 50 == 0:
            print(f"  {len(records)} cells over {link}", flush=True)
        full = job.world(RANKS)
    job.orders.write_text("")
    return records
