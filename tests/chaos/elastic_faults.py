# The driver of faults in elastic jobs: kills at named points, random faults, partitions; a table and raw JSON.
# Touches the real launcher through tests/ranks/elastic.py, and tests/bed for partitions.
"""`python tests/chaos/elastic_faults.py --cells 300 --faults 60 --partitions 30 --seed 7 --json out.json`.

What happens, and in which order, follows from the seed, which is printed. Jobs regrow after each fault instead of being
started anew. Every fault proves that it fired: the process was seen to die, to stop, or the hosts to be apart.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import platform
import random
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("ranks", "")]

from elastic import PROGRAM, Dance, kill, parent_of, split_brains  # noqa: E402

KINDS = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier", "join", "send", "receive")
PHASES = ("enqueue", "negotiate", "pack", "send", "recv", "reduce", "unpack", "complete")
RANKS = 3
# Names of this host: ranks with different names talk over TCP.
LINKS = {"shm": f"localhost:{RANKS}", "tcp": f"localhost:1,127.0.0.1:1,{socket.gethostname()}:1"}
LIMITS = {"detect": 0.1, "recover": 1.0, "replace beside imports": 3.0, "evict": 5.5, "partition": 6.0, "rejoin": 3.0}
CHAOS = Path(__file__).parents[2] / "src" / "farandole" / "_native" / "libfarandole_chaos.so"

# A cell: all ranks run one operation, and the victim dies at a point of it.
OPERATE = """
def operate(kind, name):
    big = np.ones((12_000,), np.float32)
    if kind == "allreduce": hvd.allreduce(big, op=hvd.Sum, name=name)
    if kind == "allgather": hvd.allgather(big, name=name)
    if kind == "broadcast": hvd.broadcast(big, hvd.size() - 1, name=name)
    if kind == "alltoall": hvd.alltoall(big, name=name)
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
    text = open(os.environ["DANCE_ORDERS"]).read()
    order = json.loads(text) if text.startswith("{") else {"number": 0}
    # A newcomer has done none of them: it learns from the others which was the last.
    number, last = map(int, hvd.allreduce(np.array([float(order["number"]), float(last)]), op=hvd.Max, name="cell"))
    if number <= last:
        return
    last = number
    if order["number"] != number:
        order = json.loads(open(os.environ["DANCE_ORDERS"]).read())
    for turn in range(4):
        operate(order["kind"], "x" if order["planned"] else f"t{turn}")
    victim = order["pid"] == os.getpid()
    point = f"{order['kind']}.{order['phase']}"
    if victim:
        for _ in range(2 * order["forked"]):
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)
        runtime.world.engine.chaos_set(point, "kill")
    operate(order["kind"], "x" if order["planned"] else "new")
    hvd.barrier()
    if victim:
        runtime.world.engine.chaos_set(point, "off")
        say("missed", number=number)
"""
CELLS = PROGRAM.replace("def pause():", OPERATE + "\ndef pause():\n    cell()\n    return\n\ndef nothing():", 1)


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


@dataclass
class Record:
    """One fault and what followed, in seconds."""

    what: str
    fired: bool = True
    detect: list[float] = field(default_factory=list)
    recover: float = math.nan
    replace: float = math.nan
    imports: float = math.nan  # the part of it that a new process took from its start to its `init`
    redone: int = 0  # steps that a survivor had done and does again
    note: str = ""


def wait_for_end(pid: int, seconds: float) -> float | None:
    """The moment at which a process ended."""
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
    dance: Dance, record: Record, full: dict[int, dict[str, Any]], moment: float, lost: set[int], size: int
) -> None:
    """Waits until the survivors go on and the world is full again, and notes how long it took."""
    generation = full[0]["generation"]
    survivors = {event["pid"] for event in full.values()} - lost
    again = dance.world(size, generation, 60)
    for pid in survivors:
        knew = [e for e in dance.of(pid, "lost") if e["t"] > moment - 0.05]
        record.detect += [max(0.0, knew[0]["t"] - moment)] if knew else []
        after = [e["step"] for e in dance.of(pid, "world") if e["generation"] > generation]
        if knew and after:
            record.redone = max(record.redone, knew[0]["step"] - after[0])
    assert record.redone <= 1, f"{record.redone} steps are done again"
    worlds = [[e["t"] for e in dance.of(pid, "world") if e["generation"] > generation] for pid in survivors]
    record.recover = max((times[0] for times in worlds if times), default=math.nan) - moment
    record.replace = max(event["t"] for event in again.values()) - moment
    pids = {event["pid"] for event in again.values()}
    assert survivors <= pids, "a survivor was started anew"
    record.imports = max((dance.import_seconds(pid) for pid in pids - survivors), default=math.nan)


def cells(count: int, seed: int, folder: Path) -> list[Record]:
    """Row 1: SIGKILL at points of every collective, of every kind of rank, over both kinds of links."""
    draw = random.Random(seed)
    table = [
        (link, kind, phase, victim, planned)
        for link in LINKS
        for kind in KINDS
        for phase in PHASES
        for victim in range(RANKS)
        for planned in (False, True)
    ]
    draw.shuffle(table)
    records: list[Record] = []
    for link, hosts in LINKS.items():
        mine = [cell for cell in table if cell[0] == link]
        wanted = count // 2 if link == "shm" else count - count // 2
        place = folder / f"cells-{link}"
        place.mkdir()
        words = ["-np", str(RANKS), "--min-np", "1", "-H", hosts]
        with Dance(words, place, {"FARANDOLE_LIBRARY": str(CHAOS), "DANCE_SECONDS": "7200"}, program=CELLS) as dance:
            full = dance.world(RANKS)
            fired = 0
            for number, (_, kind, phase, rank, planned) in enumerate(mine, 1):
                if fired == wanted:
                    break
                victim = full[rank]["pid"]
                order = {"number": number, "kind": kind, "phase": phase, "pid": victim, "planned": planned}
                order["forked"] = int(draw.random() < 0.25)
                with contextlib.closing(open(dance.orders.with_suffix(".new"), "w")) as file:
                    file.write(json.dumps(order))
                record = Record(f"{link} {kind}.{phase} rank {rank}" + " with data loaders" * order["forked"])
                os.replace(dance.orders.with_suffix(".new"), dance.orders)
                moment = None
                deadline = time.monotonic() + 20
                while moment is None and not any(e.get("number") == number for e in dance.of(victim, "missed")):
                    moment = wait_for_end(victim, 0.05)
                    assert time.monotonic() < deadline, f"{record.what}: neither died nor passed\n{dance.tail()}"
                if moment is None:
                    continue  # this rank does not pass this point
                fired += 1
                follow(dance, record, full, moment, {victim}, RANKS)
                records.append(record)
                if fired % 50 == 0:
                    print(f"  {fired} cells over {link}", flush=True)
                full = dance.world(RANKS)
            dance.orders.write_text("")
            dance.finish()
    return records


def faults(count: int, seed: int, folder: Path) -> list[Record]:
    """Random faults of all kinds, one after the other, in one job that goes on."""
    draw = random.Random(seed)
    place = folder / "faults"
    (place / "ledger").mkdir(parents=True)
    listed, script = place / "hosts", place / "discover"
    sizes = {"localhost": 2, "127.0.0.1": 2}

    def write() -> None:
        text = "".join(f"{name}:{slots}\n" for name, slots in sizes.items())
        (place / "hosts.new").write_text(text)
        os.replace(place / "hosts.new", listed)

    write()
    script.write_text(f"#!/bin/sh\ncat {listed}\n")
    script.chmod(0o755)
    records: list[Record] = []
    words = ["-np", "4", "--min-np", "1", "--host-discovery-script", str(script), "--drain-timeout", "5"]
    with Dance(
        words, place, {"DANCE_SECONDS": "7200", "DANCE_LEDGER": str(place / "ledger"), "DANCE_CHILDREN": "1"}
    ) as dance:
        full = dance.world(4)
        for _ in range(count):
            kind = draw.choice(["kill", "kill", "kill two", "stop", "stop long", "kill agent", "hosts", "kill again"])
            time.sleep(draw.uniform(0.05, 1.0))
            ranks = sorted(full)
            victims = [full[rank]["pid"] for rank in draw.sample(ranks, min(len(ranks) - 1, 2))]
            record = Record(kind)
            if kind == "stop":
                seconds = draw.uniform(0.2, 3.5)
                for pid in victims[:1]:
                    kill(pid, signal.SIGSTOP)
                    time.sleep(seconds)
                    kill(pid, signal.SIGCONT)
                record.note = "nobody is evicted"
                assert dance.generation == full[0]["generation"], dance.tail()
            elif kind == "stop long":
                moment = kill(victims[0], signal.SIGSTOP)
                small = dance.world(len(full) - 1, full[0]["generation"])
                record.note = f"evicted after {min(e['t'] for e in small.values()) - moment:.2f} s"
                kill(victims[0], signal.SIGCONT)
                dance.world(len(full), small[0]["generation"])
            elif kind == "hosts":
                name = draw.choice(["localhost", "127.0.0.1"])
                sizes[name] = 3 - sizes[name]
                write()
                dance.world(sum(sizes.values()), full[0]["generation"])
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
                    time.sleep(draw.uniform(0.0, 0.05))  # while the others recover
                    moment = kill(doomed[1])
                else:
                    moment = [kill(pid) for pid in doomed][-1]
                follow(dance, record, full, moment, set(doomed), sum(sizes.values()))
                if kind == "kill agent":  # the host is tried again later each time: it is not a worker's replacement
                    record.note = f"the host was back after {record.replace:.2f} s"
                    record.replace = record.imports = math.nan
            records.append(record)
            full = dance.world(sum(sizes.values()))
        dance.finish()
    twice, steps = split_brains(place / "ledger")
    assert not twice and steps > count, f"split brain at steps {twice}"
    return records


def partitions(count: int, seed: int, folder: Path) -> list[Record]:
    """Rows 12 and 13: hosts apart for 8 s, both ways and one way; never two sides that commit."""
    import subprocess

    import bed

    draw = random.Random(seed)
    place = folder / "partitions"
    (place / "ledger").mkdir(parents=True)
    records: list[Record] = []
    with bed.hosts(4, ssh=True, visible=[place]) as found:

        def start(command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
            return found[0].start(command, env, "/", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

        names = ",".join(f"host{number}:1" for number in range(1, 5))
        env = {"DANCE_SECONDS": "7200", "DANCE_LEDGER": str(place / "ledger"), "PATH": bed.PATH}
        with Dance(["-np", "4", "--min-np", "1", "-H", names], place, env, start=start) as dance:
            full = dance.world(4, seconds=60)
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
                small = dance.world(4 - len(cut), generation, 40)
                record.recover = max(event["t"] for event in small.values()) - moment
                time.sleep(max(0.0, moment + 8.0 - time.monotonic()))
                if one_way:
                    for one, other in pairs:
                        one.run(["ip", "route", "del", "blackhole", f"{other.address}/32"])
                else:
                    found.heal()
                moment = time.monotonic()
                full = dance.world(4, small[0]["generation"], 40)
                record.replace = max(event["t"] for event in full.values()) - moment
                records.append(record)
                time.sleep(draw.uniform(0.0, 6.0))
                assert dance.generation == full[0]["generation"], "they parted by themselves\n" + dance.tail()
            dance.finish()
    twice, steps = split_brains(place / "ledger")
    assert not twice and steps > count, f"split brain at steps {twice}"
    return records


def belongings(pid: int) -> dict[str, int]:
    """What a process holds: descriptors, threads, and kilobytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    memory = int(status.partition("VmRSS:")[2].split()[0])
    return {
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
        "kB": memory,
    }


def pauses(folder: Path) -> float:
    """Seconds in which nobody took a step because the ranks changed; other programs make them longer, not shorter."""
    taken = sorted((float(line.split()[3]), int(line.split()[0])) for path in folder.iterdir() for line in path.open())
    return sum(later - before for (before, old), (later, new) in itertools.pairwise(taken) if new > old)


def soak(count: int, seed: int, folder: Path) -> list[Record]:
    """Faults 15 s apart in a job that uses everything: no hang, no leak, at least 90 % of the undisturbed speed."""
    draw = random.Random(seed)
    place = folder / "soak"
    (place / "ledger").mkdir(parents=True)
    env = {"DANCE_SECONDS": "7200", "DANCE_LEDGER": str(place / "ledger"), "DANCE_CHILDREN": "1"}
    records: list[Record] = []
    with Dance(["-np", "3", "--min-np", "1", "--autotune"], place, env, program=SOAK) as dance:
        full = dance.world(3)

        def steps() -> int:
            return split_brains(place / "ledger")[1]

        spans: dict[bool, list[tuple[float, int]]] = {True: [], False: []}  # seconds and steps, disturbed or not

        def note(disturbed: bool, seconds: float, act: Callable[[], None] = lambda: None) -> None:
            began, first = time.monotonic(), steps()
            act()
            time.sleep(max(0.0, began + seconds - time.monotonic()))
            spans[disturbed].append((time.monotonic() - began, steps() - first))

        def speed(disturbed: bool) -> float:
            return sum(count for _, count in spans[disturbed]) / sum(seconds for seconds, _ in spans[disturbed])

        time.sleep(2)
        watched = [dance.process.pid, parent_of(full[0]["pid"])]  # the launcher and the agent
        before = [belongings(pid) for pid in watched]

        def fault() -> None:
            victim = full[draw.randrange(3)]["pid"]
            records.append(Record("kill"))
            follow(dance, records[-1], full, kill(victim), {victim}, 3)

        for number in range(count):
            if number % 4 == 0:  # again and again: other programs may come and go
                note(False, 10.0)
            note(True, 15.0, fault)
            full = dance.world(3)
        share = speed(True) / speed(False)
        paused = pauses(place / "ledger") / sum(seconds for seconds, _ in spans[True])
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
        dance.finish()
    twice, _ = split_brains(place / "ledger")
    assert not twice, f"split brain at steps {twice}"
    return records


def p99(values: list[float]) -> float:
    known = sorted(value for value in values if not math.isnan(value))
    return known[max(0, math.ceil(0.99 * len(known)) - 1)] if known else math.nan


def plain(record: Record) -> dict[str, Any]:
    """As JSON has it: what was not measured is null."""
    found = asdict(record)
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in found.items()}


def steal() -> float:
    """Seconds that this machine's processors worked for others, since it was started."""
    return int(Path("/proc/stat").read_text().split()[8]) / os.sysconf("SC_CLK_TCK")


def summary(name: str, records: list[Record]) -> dict[str, Any]:
    detect = [value for record in records for value in record.detect]
    found: dict[str, Any] = {"faults": len(records)}
    for what, values in (
        ("detect", detect),
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
    limits = {"recover": LIMITS["partition"], "replace": LIMITS["rejoin"]} if name == "partitions" else LIMITS
    found["over"] = [what for what in sorted(found.keys() & limits.keys()) if found[what]["p99"] > limits[what]]
    if found["over"]:
        print(f"{name:<11} over the limit: " + ", ".join(f"{what} {limits[what]} s" for what in found["over"]))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Faults in elastic jobs.")
    parser.add_argument("--cells", type=int, default=300)
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--partitions", type=int, default=30)
    parser.add_argument("--soak", type=int, default=40)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if given.seed is None else given.seed
    print(f"seed {seed}: --seed {seed} replays it", flush=True)
    before = steal()
    results: dict[str, Any] = {"seed": seed, "machine": platform.machine(), "cores": os.cpu_count(), "limits": LIMITS}
    with tempfile.TemporaryDirectory(prefix="farandole-chaos-") as folder:
        for name, act in (("cells", cells), ("faults", faults), ("partitions", partitions), ("soak", soak)):
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
