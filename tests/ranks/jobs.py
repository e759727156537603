# Jobs of real processes for tests: each job runs a piece of Python, and every rank reports lines of JSON.
# Touches only farandole.launch.
"""`start(body, np=3)` runs the same code on every rank; `results` returns the values of `report(...)` in it."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from waiting import until

import farandole
from farandole.launch import local as local

SOURCE = str(Path(farandole.__file__).parents[1])
HERE = str(Path(__file__).parent)
PRELUDE = """
import faulthandler, json, os, signal, sys, time
import numpy as np
import farandole as hvd
from farandole.base.errors import *
faulthandler.dump_traceback_later(60, exit=True)
rank = int(os.environ["FARANDOLE_RANK"])
def report(**what):
    sys.stdout.write(json.dumps(what) + "\\n")
    sys.stdout.flush()
def engine():
    from farandole.world.runtime import runtime
    return runtime.world.engine
"""


def start(
    body: str, np: int, hosts: Sequence[str] | None = None, env: Mapping[str, str] | None = None, **more: Any
) -> local.Job:
    """A job whose ranks run the prelude and then `body`. By default the other ranks continue when one fails."""
    environment = {"PYTHONPATH": f"{SOURCE}:{HERE}", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **(env or {})}
    more.setdefault("stop_on_failure", False)
    return local.start([sys.executable, "-c", PRELUDE + body], np, hosts, environment, **more)


def results(job: local.Job, rank: int) -> list[dict[str, Any]]:
    """What a rank has reported so far."""
    return [json.loads(line) for line in job.stdout(rank).splitlines() if line.startswith("{")]


def last_result(job: local.Job, rank: int) -> Any:
    """A rank's newest report; None before the first."""
    return (results(job, rank) or [None])[-1]  # type: ignore[list-item]


def run(body: str, np: int, hosts: Sequence[str] | None = None, timeout: float = 60.0, **more: Any) -> list[Any]:
    """Runs a job that must succeed. Returns the last report of every rank."""
    with start(body, np, hosts, **more) as job:
        code = job.wait(timeout)
        output = [job.stderr(rank) for rank in range(np)]
        assert code == 0, f"exit codes {job.codes}:\n" + "\n".join(f"rank {r}: {text}" for r, text in enumerate(output))
        return [last_result(job, rank) for rank in range(np)]


def look_until(done: Callable[[], Any], job: local.Job, timeout: float = 60.0) -> Any:
    """Waits until `done()` returns a true value. If it is late, the error shows the output of all ranks."""
    return until(
        done, timeout, lambda: "\n".join(f"rank {r}: {job.stdout(r)} {job.stderr(r)}" for r in range(len(job.codes)))
    )


def environment_of_chaos(library: Path) -> dict[str, str]:
    return {"FARANDOLE_LIBRARY": os.environ.get("FARANDOLE_LIBRARY", str(library))}


def kill_one_of_three(program: str, environment: Mapping[str, str]) -> None:
    """Three ranks report their process ids and run forever. Rank 1 is killed, and the others report their error."""
    with local.start([sys.executable, "-c", program], 3, None, environment, stop_on_failure=False) as job:
        for rank in range(3):
            look_until(lambda: results(job, rank), job, 150)  # noqa: B023
        os.kill(results(job, 1)[0]["pid"], signal.SIGKILL)
        for rank in (0, 2):
            found = look_until(lambda: results(job, rank)[1:], job, 20)  # noqa: B023
            assert found == [{"error": "PeerLost"}]
        job.wait(60)
        assert [job.codes[rank] for rank in (0, 2)] == [0, 0]
