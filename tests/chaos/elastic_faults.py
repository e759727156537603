# The driver of faults in elastic jobs: kills at named points, random faults, partitions; a table and raw JSON.
# Touches the real launcher through tests/ranks/elastic.py, and tests/bed for faults that need several hosts.
"""`python tests/chaos/elastic_faults.py --cells 300 --hosts 60 --partitions 30 --seed 7 --json out.json`.

Each part has its count, and 0 leaves it out: kills on one host (`cells`) and between hosts (`hosts`), random faults,
deaths inside recoveries (`nested`), saves before ranks leave (`saves`), `partitions`, and a `soak`.

What happens, and in which order, follows from the seed, which is printed. Jobs regrow after each fault instead of being
started again. Every fault proves that it fired: the process was seen to die, to stop, or the hosts to be apart.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic_cells import cells, cells_between_hosts
from elastic_depths import SLOTS, nested, saves
from elastic_records import LIMITS, LIMITS_OF, Record, follow, plain, steal, summary

from elastic import PROGRAM, ElasticJob, discover, kill, parent_of, split_brains, within  # isort: skip

# Many small tensors (fusion), half precision (compression), a process set, tuning: all at once.
FEATURES = """
def pause():
    hvd.grouped_allreduce([np.full(64 + 13 * n, 1.0, np.float32) for n in range(24)], op=hvd.Sum, name="many")
    hvd.allreduce(np.ones(4096, np.float16), op=hvd.Sum, name="half")
    if pair.process_set_id is not None and hvd.rank() in (0, 1):
        hvd.allreduce(np.ones(512, np.float32), op=hvd.Sum, name="pair", process_set=pair)

def nothing():"""
SOAK = PROGRAM.replace("def pause():", FEATURES, 1).replace(
    "hvd.init()", "pair = hvd.ProcessSet([0, 1])\nhvd.init(process_sets=[pair])", 1
)


def faults(count: int, seed: int, folder: Path) -> list[Record]:
    """Random faults of all kinds, one after the other, in one job that continues."""
    draw = random.Random(seed)
    scratch = folder / "faults"
    (scratch / "ledger").mkdir(parents=True)
    listed, script = discover(scratch, "")
    sizes = {"localhost": 2, "127.0.0.1": 2}

    def write() -> None:
        text = "".join(f"{name}:{slots}\n" for name, slots in sizes.items())
        (scratch / "hosts.new").write_text(text)
        os.replace(scratch / "hosts.new", listed)

    write()
    records: list[Record] = []
    arguments = [
        "-np",
        "4",
        "--min-np",
        "1",
        *SLOTS,
        str(script),
        "--drain-timeout",
        "5",
    ]
    with ElasticJob(
        arguments, scratch, {"JOB_SECONDS": "7200", "JOB_LEDGER": str(scratch / "ledger"), "JOB_CHILDREN": "1"}
    ) as job:
        full = job.world(4)
        for _ in range(count):
            kind = draw.choice(["kill", "kill", "kill two", "stop", "stop long", "kill agent", "hosts", "kill again"])
            time.sleep(draw.uniform(0.05, 1.0))  # sleep: the fault comes at any moment
            ranks = sorted(full)
            victims = [full[rank]["pid"] for rank in draw.sample(ranks, min(len(ranks) - 1, 2))]
            record = Record(kind)
            if kind == "stop":
                seconds = draw.uniform(0.2, 3.5)
                for pid in victims[:1]:
                    kill(pid, signal.SIGSTOP)
                    time.sleep(seconds)  # sleep: the fault, a rank that is stopped
                    kill(pid, signal.SIGCONT)
                record.note = "no rank is evicted"
                assert job.generation == full[0]["generation"], job.tail()
            elif kind == "stop long":
                moment = kill(victims[0], signal.SIGSTOP)
                small = job.world(len(full) - 1, full[0]["generation"])
                record.note = f"evicted after {min(e['t'] for e in small.values()) - moment:.2f} s"
                kill(victims[0], signal.SIGCONT)
                job.world(len(full), small[0]["generation"])
            elif kind == "hosts":
                name = draw.choice(["localhost", "127.0.0.1"])
                sizes[name] = 3 - sizes[name]
                write()
                job.world(sum(sizes.values()), full[0]["generation"])
            else:
                doomed = {"kill": victims[:1], "kill again": victims, "kill two": victims}.get(kind, [])
                moment = time.monotonic()
                if kind == "kill agent":
                    agent = parent_of(full[ranks[-1]]["pid"])
                    doomed = [event["pid"] for event in full.values() if parent_of(event["pid"]) == agent]
                    if len(doomed) == len(full):
                        continue
                    moment = kill(agent)
                elif kind == "kill again" and len(doomed) > 1:
                    kill(doomed[0])
                    time.sleep(draw.uniform(0.0, 0.05))  # sleep: while the others recover
                    moment = kill(doomed[1])
                else:
                    moment = [kill(pid) for pid in doomed][-1]
                lost = {rank for rank in ranks if full[rank]["pid"] in doomed}
                follow(job, record, full, moment, lost, sum(sizes.values()))
                if kind == "kill agent":  # the host is tried again after a growing delay; no worker is replaced
                    record.note = f"the host was back after {record.replace:.2f} s"
                    record.replace = record.imports = math.nan
            records.append(record)
            full = job.world(sum(sizes.values()))
        job.finish()
    twice, steps = split_brains(scratch / "ledger")
    assert not twice and steps > count, f"split brain at steps {twice}"
    return records


def partitions(count: int, seed: int, folder: Path) -> list[Record]:
    """Rows 12 and 13: the network is cut for 8 s, in both directions or in one; the two sides never both commit."""
    import bed

    draw = random.Random(seed)
    scratch = folder / "partitions"
    (scratch / "ledger").mkdir(parents=True)
    records: list[Record] = []
    with bed.hosts(4, ssh=True, visible=[scratch]) as found:
        names = ",".join(f"host{number}:1" for number in range(1, 5))
        env = {"JOB_SECONDS": "7200", "JOB_LEDGER": str(scratch / "ledger"), "PATH": bed.PATH}
        with ElasticJob(["-np", "4", "--min-np", "1", "-H", names], scratch, env, start=within(found[0])) as job:
            full = job.world(4, seconds=60)
            for _ in range(count):
                one_way = draw.random() < 0.3
                cut = draw.sample([1, 2, 3], draw.choice([1, 2]))
                generation = full[0]["generation"]
                record = Record(f"{4 - len(cut)}|{len(cut)}" + " one way" * one_way)
                if one_way:  # what the cut hosts send is lost; what is sent to them arrives
                    pairs = [(found[a], found[b]) for a in cut for b in range(4) if b not in cut]
                    for one, other in pairs:
                        one.run(["ip", "route", "add", "blackhole", f"{other.address}/32"])
                else:
                    found.partition([found[index] for index in cut])
                moment = time.monotonic()
                small = job.world(4 - len(cut), generation, 40)
                record.recover = max(event["t"] for event in small.values()) - moment
                time.sleep(max(0.0, moment + 8.0 - time.monotonic()))  # sleep: the fault lasts 8 s
                if one_way:
                    for one, other in pairs:
                        one.run(["ip", "route", "del", "blackhole", f"{other.address}/32"])
                else:
                    found.heal()
                moment = time.monotonic()
                full = job.world(4, small[0]["generation"], 40)
                record.replace = max(event["t"] for event in full.values()) - moment
                records.append(record)
                time.sleep(draw.uniform(0.0, 6.0))  # sleep: the ranks must stay together if there is no fault
                assert job.generation == full[0]["generation"], "they parted by themselves\n" + job.tail()
            job.finish()
    twice, steps = split_brains(scratch / "ledger")
    assert not twice and steps > count, f"split brain at steps {twice}"
    return records


def belongings(pid: int) -> dict[str, int]:
    """The resources of a process: descriptors, threads, and kilobytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    memory = int(status.partition("VmRSS:")[2].split()[0])
    return {
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
        "kB": memory,
    }


def pauses(folder: Path) -> float:
    """Seconds without a step because the set of ranks changed; other programs make them longer, not shorter."""
    taken = sorted((float(line.split()[3]), int(line.split()[0])) for path in folder.iterdir() for line in path.open())
    return sum(later - before for (before, old), (later, new) in itertools.pairwise(taken) if new > old)


def soak(count: int, seed: int, folder: Path) -> list[Record]:
    """Faults 15 s apart in a job that uses everything: no hang, no leak, at least 90 % of the speed without faults."""
    draw = random.Random(seed)
    scratch = folder / "soak"
    (scratch / "ledger").mkdir(parents=True)
    env = {"JOB_SECONDS": "7200", "JOB_LEDGER": str(scratch / "ledger"), "JOB_CHILDREN": "1"}
    records: list[Record] = []
    with ElasticJob(["-np", "3", "--min-np", "1", "--autotune"], scratch, env, program=SOAK) as job:
        full = job.world(3)

        def steps() -> int:
            return split_brains(scratch / "ledger")[1]

        spans: dict[bool, list[tuple[float, int]]] = {True: [], False: []}  # seconds and steps, disturbed or not

        def note(disturbed: bool, seconds: float, act: Callable[[], None] = lambda: None) -> None:
            began, first = time.monotonic(), steps()
            act()
            time.sleep(max(0.0, began + seconds - time.monotonic()))  # sleep: the time that is measured
            spans[disturbed].append((time.monotonic() - began, steps() - first))

        def speed(disturbed: bool) -> float:
            return sum(count for _, count in spans[disturbed]) / sum(seconds for seconds, _ in spans[disturbed])

        job.wait(lambda: steps() > 100, what="a hundred steps: all that is loaded late is there")
        watched = [job.process.pid, parent_of(full[0]["pid"])]  # the launcher and the agent
        before = [belongings(pid) for pid in watched]

        def fault() -> None:
            rank = draw.randrange(3)
            records.append(Record("kill"))
            follow(job, records[-1], full, kill(full[rank]["pid"]), {rank}, 3)

        for number in range(count):
            if number % 4 == 0:  # several times, because the load of other programs changes
                note(False, 10.0)
            note(True, 15.0, fault)
            full = job.world(3)
        share = speed(True) / speed(False)
        paused = pauses(scratch / "ledger") / sum(seconds for seconds, _ in spans[True])
        after = [belongings(pid) for pid in watched]
        print(
            f"soak: {share:.0%} of the undisturbed speed, {paused:.1%} of the time without steps; "
            f"launcher and agent before {before}, after {after}",
            flush=True,
        )
        for one, other in zip(before, after, strict=True):
            assert other["descriptors"] <= one["descriptors"] and other["threads"] <= one["threads"], (one, other)
        records[
            -1
        ].note = (
            f"speed {share:.3f}, paused {paused:.4f}, disturbed and undisturbed {spans}, before {before}, after {after}"
        )
        assert share >= 0.9 or os.getloadavg()[0] > 2 * (os.cpu_count() or 1), f"{share:.0%} of the undisturbed speed"
        job.finish()
    twice, _ = split_brains(scratch / "ledger")
    assert not twice, f"split brain at steps {twice}"
    return records


PARTS: dict[str, tuple[int, Callable[[int, int, Path], list[Record]]]] = {
    "cells": (300, cells),
    "hosts": (60, cells_between_hosts),
    "faults": (60, faults),
    "nested": (20, nested),
    "saves": (1000, saves),
    "partitions": (30, partitions),
    "soak": (40, soak),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Faults in elastic jobs.")
    for name, (count, _) in PARTS.items():
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if given.seed is None else given.seed
    print(f"seed {seed}: --seed {seed} replays it", flush=True)
    before = steal()
    limits = {"": LIMITS, **LIMITS_OF}
    results: dict[str, Any] = {"seed": seed, "machine": platform.machine(), "cores": os.cpu_count(), "limits": limits}
    with tempfile.TemporaryDirectory(prefix="farandole-chaos-") as folder:
        for name, (_, act) in PARTS.items():
            count = getattr(given, name)
            if count:
                records = act(count, seed, Path(folder))
                results[name] = {**summary(name, records), "records": [plain(record) for record in records]}
                results["steal_s"] = round(steal() - before, 2)
                results["load"] = os.getloadavg()
                if given.json is not None:
                    given.json.parent.mkdir(parents=True, exist_ok=True)
                    given.json.write_text(json.dumps(results, indent=1) + "\n")
    if given.json is not None:
        print(f"raw results in {given.json}")
    return int(any(isinstance(one, dict) and one.get("over") for one in results.values()))


if __name__ == "__main__":
    sys.exit(main())
