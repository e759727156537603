# Row 2 (deaths during the recovery from a death) and row 23 (a thousand saves before ranks leave), in jobs that grow.
# Touches the real launcher through tests/ranks/elastic.py.
"""`nested` and `saves` are parts of elastic_faults.py. Each victim in a chain kills itself at its point."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from elastic_records import Record

from elastic import PROGRAM, ElasticJob, alive, discover, kill, looks, parent_of  # isort: skip

WORLD = 7
DEPTH = 5  # deaths during recovery, after the first death
SAVERS = 8
SLOTS = ("--blacklist", "slot", "--host-discovery-script")  # the hosts stay, even if their ranks fail

# Each rank in the chain dies soon after the one before it: when it detects that death ("told"), inside `reset` (after
# a delay that starts then), or in the new world before its first collective ("joined"). So no world between the first
# and the last death is ever complete.
FATE = """
def fate(point):
    text = open(os.environ["JOB_ORDERS"]).read()
    order = json.loads(text) if text.startswith("{") else {"chain": []}
    me = int(os.environ["FARANDOLE_WORKER"])
    if me not in order["chain"]:
        return
    place = order["chain"].index(me)
    mark = f"{os.environ['JOB_ORDERS']}.{order['number']}."
    if (place == 0) != (point == "step") or (place and not os.path.exists(f"{mark}{place - 1}")):
        return
    def die(where):
        say("dies", number=order["number"], place=place, point=where)
        open(f"{mark}{place}", "x").close()
        os.kill(os.getpid(), 9)
    delay = order["delays"][place]
    if point == "told" and delay:
        threading.Timer(delay, die, ["reset"]).start()
    else:
        die(point)
"""
CHAINS = PROGRAM.replace("def pause():", FATE + "\ndef pause():\n    fate('step')\n    return\n\ndef nothing():", 1)
CHAINS = CHAINS.replace(
    "step=step)\n        runtime.reset(commits)\n",
    "step=step)\n        fate('told')\n        runtime.reset(commits)\n        fate('joined')\n",
    1,
)


def nested(count: int, seed: int, folder: Path, least: int = 3) -> list[Record]:
    """Row 2: chains of deaths, each during the recovery from the one before; `least` to DEPTH of them in recovery."""
    draw = random.Random(seed)
    place = folder / "nested"
    place.mkdir()
    records: list[Record] = []
    with ElasticJob(["-np", str(WORLD), "--min-np", "1"], place, {"JOB_SECONDS": "7200"}, program=CHAINS) as job:
        full = job.world(WORLD, seconds=60)
        for number in range(count):
            depth = draw.randint(least, DEPTH)
            ranks = draw.sample(range(WORLD), depth + 1)
            delays = [draw.choice([0.0, draw.uniform(0.0, 0.03)]) for _ in ranks]
            record, full = _chain(job, full, {"number": number, "delays": delays}, ranks)
            records.append(record)
        job.orders.write_text("")
        job.finish()
    return records


def _chain(
    job: ElasticJob, full: dict[int, dict[str, Any]], order: dict[str, Any], ranks: list[int]
) -> tuple[Record, dict[int, dict[str, Any]]]:
    order["chain"] = [full[rank]["worker"] for rank in ranks]
    job.orders.with_suffix(".new").write_text(json.dumps(order))
    os.replace(job.orders.with_suffix(".new"), job.orders)

    def deaths() -> list[dict[str, Any]]:
        return [e for e in job.events if e["event"] == "dies" and e["number"] == order["number"]]

    job.wait(lambda: len(deaths()) == len(ranks), 30.0, f"the deaths of ranks {ranks}")
    points = [event["point"] for event in sorted(deaths(), key=lambda event: event["place"])]
    first, last = (act(event["t"] for event in deaths()) for act in (min, max))
    record = Record(f"depth {len(ranks) - 1}: ranks {ranks} at {', '.join(points)}")
    generation = full[0]["generation"]
    survivors = {event["worker"] for rank, event in full.items() if rank not in ranks}
    again = job.world(WORLD, generation, 60)
    between = [e for e in job.events if e["event"] == "world" and first < e["t"] <= last]
    assert not between, f"{record.what}: a world was complete before the last death: {between}"
    worlds = [
        min(e["t"] for e in job.of(worker, "world", by="worker") if e["generation"] > generation)
        for worker in survivors
    ]
    record.recover = max(worlds) - last
    record.replace = max(event["t"] for event in again.values()) - last
    workers = {event["worker"] for event in again.values()}
    assert survivors <= workers and not workers & set(order["chain"]), f"{record.what}: {workers}"
    record.imports = max(job.import_seconds(worker, by="worker") for worker in workers - survivors)
    assert not any(alive(full[rank]["pid"]) for rank in ranks)
    return record, again


def saves(count: int, seed: int, folder: Path) -> list[Record]:
    """Row 23: SIGTERM to a rank, and sometimes to an agent, until there are enough saves: each rank once, at one
    step; then the world is full again."""
    draw = random.Random(seed)
    place = folder / "saves"
    saved = place / "saved"
    saved.mkdir(parents=True)
    listed, script = discover(place, "")

    def offer(*names: str) -> None:
        (place / "hosts.new").write_text("".join(f"{name}:{SAVERS // 2}\n" for name in names))
        os.replace(place / "hosts.new", listed)

    offer("localhost", "127.0.0.1")
    arguments = ["-np", str(SAVERS), "--min-np", "1", *SLOTS, str(script)]
    env = {"JOB_SECONDS": "7200", "JOB_SAVES": str(saved), "JOB_CHILDREN": "1"}
    records: list[Record] = []
    with ElasticJob(arguments, place, env) as job:
        full = job.world(SAVERS, seconds=60)
        known: set[str] = set()
        while len(known) < count:
            generation = full[0]["generation"]
            rank = draw.randrange(SAVERS)
            agent = draw.random() < 0.1
            time.sleep(draw.uniform(0.0, 0.05))  # sleep: the fault happens at any point of a step
            record = Record(f"SIGTERM to {'the agent of' * agent} rank {rank}".replace("  ", " "))
            moment = kill(parent_of(full[rank]["pid"]) if agent else full[rank]["pid"], signal.SIGTERM)
            if agent:
                small = job.world(SAVERS // 2, generation)
                offer(small[0]["host"])  # the scheduler removes this host too, and offers it again as a new one
                job.wait(lambda: not alive(full[rank]["pid"]), 20.0)  # noqa: B023
                seen = looks(place)
                job.wait(lambda: looks(place) >= seen + 2)  # noqa: B023 (one may have begun before the change)
                offer("localhost", "127.0.0.1")
                full = job.world(SAVERS, small[0]["generation"], 60)
                leave = small
            else:
                leave = job.world(SAVERS - 1, generation)
            names = {path.name for path in saved.iterdir()} - known
            known |= names
            _saved_once(names, records, record, job, generation)
            record.recover = max(event["t"] for event in leave.values()) - moment
            full = job.world(SAVERS, leave[0]["generation"], 60)
            records.append(record)
        assert not job.lines_with("has ended"), job.tail()  # no rank was killed
        job.finish()
    records[-1].note = f"{len(known)} saves"
    return records


def _saved_once(names: set[str], records: list[Record], record: Record, job: ElasticJob, generation: int) -> None:
    """Every rank of that world has saved, once, and all at one step."""
    pids = sorted(e["pid"] for e in job.events if e["event"] == "world" and e["generation"] == generation)
    found = sorted(int(name.partition("-")[0]) for name in names)
    what = f"{record.what}, after {len(records)} of them: {sorted(names)}, and the ranks are {pids}"
    assert found == pids and len({name.partition("-")[2] for name in names}) == 1, what
