# Rows of the table of faults that need a job of their own: stops in static jobs, load, signals.
# Touches the launcher as users type it, and jobs of tests/ranks/jobs.py.
"""Long ones are short here and longer with CHAOS_N."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import jobs
import pytest
from elastic import LONG, PROGRAM, Dance, alive, kill

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(240)]

STEADY = """
hvd.init()
total = np.zeros(1000)
report(pid=os.getpid())
for step in range(500):
    total += hvd.allreduce(np.full(1000, float(step % 11) * (rank + 1) / 7), op=hvd.Sum, name="x")
    time.sleep(0.004)
report(pid=os.getpid(), sum=total.tobytes().hex()[:64])
hvd.shutdown()
"""


def test_row_6_a_stopped_rank_of_a_static_job_is_waited_for() -> None:
    """It goes on when the rank does, with the same bits; a static job evicts nobody."""
    undisturbed = jobs.run(STEADY, 2)
    with jobs.start(STEADY, 2) as job:
        found = jobs.look_until(lambda: jobs.results(job, 1), job)
        kill(found[0]["pid"], signal.SIGSTOP)
        time.sleep(30.0 if LONG else 6.0)  # beyond the time of eviction of an elastic job
        kill(found[0]["pid"], signal.SIGCONT)
        assert job.wait(60) == 0
        assert [jobs.results(job, rank)[-1]["sum"] for rank in (0, 1)] == [one["sum"] for one in undisturbed]


def test_row_37_busy_cores_evict_nobody(tmp_path: Path) -> None:
    """Eight ranks with eight busy threads each, on whatever cores there are."""
    busy = """
def work():
    data = bytes(10**6)
    while True:
        hashlib.sha256(data).digest()  # without the GIL
for _ in range(8):
    threading.Thread(target=work, daemon=True).start()
fresh = True
"""
    program = PROGRAM.replace("fresh = True\n", busy, 1)
    with Dance(["-np", "8", "--min-np", "1", "--start-timeout", "120"], tmp_path, program=program) as dance:
        dance.world(8, seconds=120)
        generation = dance.generation
        time.sleep(60.0 if LONG else 8.0)
        assert dance.generation == generation and not dance.said("evicted"), dance.tail()


STUCK = """
import os, signal, sys, threading, time
import numpy as np
import farandole as hvd
hvd.init()
signal.signal(signal.SIGTERM, lambda *_: (print("handler ran", flush=True), sys.exit(3)))
def wait():
    hvd.allreduce(np.ones(3), name="never")
print("stuck", os.getpid(), flush=True)
if hvd.rank() == 0:
    if os.environ["WHERE"] == "thread":
        threading.Thread(target=wait, daemon=True).start()
        time.sleep(60)
    wait()
time.sleep(60)
"""


@pytest.mark.parametrize("where", ["main", "thread"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_row_38_signals_reach_ranks_that_wait_in_a_stalled_collective(tmp_path: Path, where: str, number: int) -> None:
    with Dance(["-np", "2", "--min-np", "1"], tmp_path, {"WHERE": where}, STUCK) as dance:
        dance.wait(lambda: sum("stuck" in line for line in dance.lines) == 2)
        time.sleep(0.3)
        moment = time.monotonic()
        dance.process.send_signal(number)
        assert dance.process.wait(20) == 128 + number
        took = time.monotonic() - moment
        pids = [int(line.split()[-1]) for line in dance.lines if "stuck" in line]
        assert took < 3.0 and not any(map(alive, pids))
        if number == signal.SIGTERM:
            assert sum("handler ran" in line for line in dance.lines) == 2
