"""The parts about a job's life: how long it takes to start, to join and leave; what it costs while it is idle.
Starts whole jobs through processes.py, and asks pools; returns rows."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from . import processes
from .plan import Plan, Row, Samples, row
from .processes import PYTHON
from .rank_pools import RankPools

OURS = "import torch, farandole.torch as hvd; hvd.init(); assert hvd.size() == 2"
OTHERS = "import torch, horovod.torch as hvd; hvd.init(); assert hvd.size() == 2"
GLOO = "import torch.distributed as d; d.init_process_group('gloo'); assert d.get_world_size() == 2"


def start(plan: Plan, pools_by_size: RankPools, peer_python: str) -> Iterator[Row]:
    """Two ranks that import torch, init and end, as a user starts them; `import torch` is a part of each."""
    if not processes.has_torch():
        pools_by_size.note("start: not measured without torch")
        return
    pools_by_size.clear()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "gloo.py")
        script.write_text(GLOO + "; d.destroy_process_group()\n")
        commands = {
            "farandole": [PYTHON, "-m", "farandole", "run", "-np", "2", PYTHON, "-c", OURS],
            "torchrun on Gloo": [PYTHON, "-m", "torch.distributed.run", "--nproc_per_node", "2", str(script)],
            "import torch": [PYTHON, "-c", "import torch"],
        }
        if peer_python:
            run = str(Path(peer_python).parent / "horovodrun")
            commands["other Horovod"] = [run, "-np", "2", peer_python, "-c", OTHERS]
        values: dict[str, Samples] = {name: [] for name in commands}
        for repeat in range(plan.repeats + plan.in_earnest):
            for name, command in commands.items():
                took = processes.seconds(command, {"TMPDIR": folder})  # torchrun leaves files
                if repeat > 0 or not plan.in_earnest:  # the first one fills the page cache
                    values[name].append(took)
    for name in [name for name in values if name != "import torch"]:
        alone = zip(values[name], values["import torch"], strict=True)
        values[f"{name}, less import torch"] = [took - less for took, less in alone]
    yield row("start", "start, import torch, init, end", 2, "s", values)


def life(plan: Plan, pools_by_size: RankPools) -> Iterator[Row]:
    """init and shutdown in running processes."""
    names = {"farandole": "farandole", "gloo": "Gloo"}
    values: dict[str, Samples] = {}
    with pools_by_size.pools(plan.ranks[0], list(names)) as pools:
        for turn in range(plan.repeats + 1):
            for name, pool in pools.items():
                count = -(-plan.lives // plan.repeats) if turn else 1
                answers = pools_by_size.attempt(pool, f"{names[name]}: init and shutdown", "life", count=count)
                if turn > 0 and answers is not None:  # a repeat is one init and shutdown; all of them are kept
                    each = zip(*(answer["times"] for answer in answers), strict=True)
                    values.setdefault(names[name], []).extend(max(times) for times in each)
    yield row("life", "init and shutdown", plan.ranks[0], "s", values)


def idle(plan: Plan, pools_by_size: RankPools) -> Iterator[Row]:
    """CPU time and context switches per rank of a job that has worked and now waits."""
    names = {"farandole": "farandole", "gloo": "Gloo", "peer": "other Horovod"}
    cpu: dict[str, Samples] = {}
    switches: dict[str, Samples] = {}
    command = {"operation": "allreduce", "bytes": 1 << 16, "kind": "reused", "dtype": "float32", "count": 3}
    interface = "torch" if processes.has_torch() else "numpy"
    with pools_by_size.pools(plan.ranks[0], list(names)) as pools:
        for _ in range(plan.repeats):
            for name, pool in pools.items():
                what = f"{names[name]}: idle"
                before = pools_by_size.attempt(pool, what, "collective", **command, interface=interface)
                answers = before and pools_by_size.attempt(pool, what, "idle", seconds=plan.idle_seconds)
                if not answers:
                    continue
                cpu.setdefault(names[name], []).append(statistics.mean(one["cpu_percent"] for one in answers))
                switches.setdefault(names[name], []).append(statistics.mean(one["switches"] for one in answers))
    yield row("idle", "CPU of an idle rank", plan.ranks[0], "%", cpu)
    yield row("idle", "wake-ups of an idle rank", plan.ranks[0], "/s", switches)
