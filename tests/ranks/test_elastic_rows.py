# Rows of docs/faults.md that need a separate job: stopped ranks in static jobs, load, signals.
# Touches the launcher as users type it, and jobs of tests/ranks/jobs.py.
"""The waits are short here and longer with CHAOS_N."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import jobs
import pytest
from elastic import LONG, PROGRAM, ElasticJob, alive, kill
from waiting import in_time

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(240)]
ENDS_S = 1.0  # from a signal to the end of the job

HUNDREDS_OF_STEPS = """
hvd.init()
total = np.zeros(1000)
report(pid=os.getpid())
for step in range(500):
    total += hvd.allreduce(np.full(1000, float(step % 11) * (rank + 1) / 7), op=hvd.Sum, name="x")
    time.sleep(0.004)  # sleep: stands for the computation of a step
report(pid=os.getpid(), sum=total.tobytes().hex()[:64])
hvd.shutdown()
"""


def test_row_6_a_stopped_rank_of_a_static_job_is_waited_for() -> None:
    """The job continues when the rank does, with the same bits; a static job evicts no rank."""
    undisturbed = jobs.run(HUNDREDS_OF_STEPS, 2)
    with jobs.start(HUNDREDS_OF_STEPS, 2) as job:
        found = jobs.look_until(lambda: jobs.results(job, 1), job)
        kill(found[0]["pid"], signal.SIGSTOP)
        time.sleep(30.0 if LONG else 6.0)  # sleep: it is stopped beyond the time of eviction of an elastic job
        kill(found[0]["pid"], signal.SIGCONT)
        assert job.wait(60) == 0
        assert [jobs.results(job, rank)[-1]["sum"] for rank in (0, 1)] == [one["sum"] for one in undisturbed]


COMPUTE = """
import time
def compute(seconds):
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass
"""
ALLREDUCE_LOOP = """
import json, os, sys, time
import numpy as np
import farandole as hvd
hvd.init()
print("event " + json.dumps({"event": "up", "pid": os.getpid(), "rank": hvd.rank()}), flush=True)
while hvd.allreduce(np.array([float(os.path.exists(os.environ["JOB_FINISH"]))]), op=hvd.Max, name="go")[0] == 0:
    compute(0.01)
hvd.shutdown()
"""


@contextlib.contextmanager
def slowed(pid: int, seconds: float = 20.0) -> Iterator[float]:
    """Inside this context, the process runs only for a tenth of the time."""
    turn = f"kill -STOP {pid}; sleep 0.18; kill -CONT {pid}; sleep 0.02"  # sleep: stopped for nine tenths of the time
    command = ["sh", "-c", f"for i in $(seq {int(seconds / 0.2)}); do {turn}; done"]
    began = time.monotonic()
    with subprocess.Popen(command) as turns:
        try:
            yield began
        finally:
            turns.terminate()
            turns.wait()
            kill(pid, signal.SIGCONT)


def test_row_17_a_slow_rank_is_named_with_what_the_others_wait(tmp_path: Path) -> None:
    program = PROGRAM.replace("def work():\n", COMPUTE + "def work():\n    return compute(0.01)\n", 1)
    with ElasticJob(["-np", "2", "--min-np", "1"], tmp_path, program=program) as job:
        full = job.world(2)
        with slowed(full[1]["pid"]) as began:
            line = job.wait(lambda: job.lines_with("slow"), 60.0, "the name of the slow rank")[0]
            took = time.monotonic() - began
        print(f"named after {took:.1f} s: {line}")
        found = re.search(r"rank (\d+) on \S+ is slow: the others wait for it (\d+)% of the time", line)
        assert found and found[1] == "1" and int(found[2]) >= 50, line
        in_time(took, 10.0, "naming a slow rank")
        assert not job.lines_with("rank 0 on") and not job.lines_with("evicted"), job.tail()
        job.finish()


def test_row_17_a_slow_rank_of_a_static_job_is_named(tmp_path: Path) -> None:
    with ElasticJob(["-np", "2"], tmp_path, program=COMPUTE + ALLREDUCE_LOOP) as job:
        up = job.wait(lambda: [one for one in job.events if one["rank"] == 1], 30.0)
        with slowed(up[0]["pid"]):
            named = "is slow: the others wait for it"
            line = job.wait(lambda: [one for one in job.lines if named in one], 60.0, "the name of the slow rank")[0]
        assert "rank 1 on " in line, line
        job.finish_file.touch()
        assert job.process.wait(60) == 0, job.tail()


def test_row_37_busy_cores_evict_no_rank(tmp_path: Path) -> None:
    """Eight ranks with eight busy threads each, on any number of cores."""
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
    with ElasticJob(["-np", "8", "--min-np", "1", "--start-timeout", "120"], tmp_path, program=program) as job:
        job.world(8, seconds=120)
        generation = job.generation
        time.sleep(60.0 if LONG else 8.0)  # sleep: longer than eviction takes
        assert job.generation == generation and not job.lines_with("evicted"), job.tail()


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
        time.sleep(60)  # sleep: until the signal ends it
    wait()
time.sleep(60)  # sleep: until the signal ends it
"""


@pytest.mark.parametrize("where", ["main", "thread"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_row_38_signals_reach_ranks_that_wait_in_a_stalled_collective(tmp_path: Path, where: str, number: int) -> None:
    """The median of three jobs ends within a second. If the first two do, the median does too; no third job runs."""
    took: list[float] = []
    with contextlib.ExitStack() as jobs_at_once:
        command = ["-np", "2", "--min-np", "1"]
        for job in [
            jobs_at_once.enter_context(ElasticJob(command, tmp_path, {"WHERE": where}, STUCK)) for _ in range(2)
        ]:
            took.append(ended_by(job, number))
    if max(took) > ENDS_S:
        with ElasticJob(command, tmp_path, {"WHERE": where}, STUCK) as job:
            took.append(ended_by(job, number))
    print(f"ended after {took} s")
    in_time(sorted(took)[1 if len(took) == 3 else -1], ENDS_S, f"the end of a job with stuck ranks ({took})")


def ended_by(job: ElasticJob, number: int) -> float:
    """Seconds from the signal to the end of a job whose ranks are stuck."""
    job.wait(lambda: sum("stuck" in line for line in job.lines) == 2)
    time.sleep(0.3)  # sleep: the line comes before the call in which they wait, and the call itself cannot be observed
    moment = time.monotonic()
    job.process.send_signal(number)
    assert job.process.wait(60) == 128 + number
    took = time.monotonic() - moment
    pids = [int(line.split()[-1]) for line in job.lines if "stuck" in line]
    assert not any(map(alive, pids))
    if number == signal.SIGTERM:
        job.lines_with("")  # its last output may still be in the pipe
        assert sum("handler ran" in line for line in job.lines) == 2
    return took
