# Random losses in elastic jobs; afterwards the test checks which samples the model has used, and its sharded state.
# Touches elastic_runs.py and elastic_counting.py.
"""Half of the jobs have two hosts, which are two names of this host. With `make chaos` there are 60 jobs."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from elastic_runs import ElasticRun
from jobs import results, start

PROGRAM = str(Path(__file__).parent / "elastic_counting.py")
RUNS = 60 * int(os.environ["CHAOS_N"]) if "CHAOS_N" in os.environ else 3


@pytest.mark.ranks
@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.timeout(60 + 30 * RUNS)
def test_row_25_random_losses_lose_and_repeat_nothing(tmp_path: Path) -> None:
    seed = int(os.environ.get("CHAOS_SEED", "25"))
    draw = random.Random(seed)
    records: list[dict[str, Any]] = []
    for number in range(RUNS):
        length, batch, interval = draw.randrange(20, 200), draw.randrange(1, 6), draw.randrange(1, 8)
        ranks = draw.randrange(2, 5)
        hosts = "" if number % 2 else f"localhost:{(ranks + 1) // 2},127.0.0.1:{ranks // 2}"
        what = f"seed {seed}, run {number}: {ranks} ranks, {length} samples, {batch}, commits every {interval}"
        with ElasticRun(tmp_path / str(number), [PROGRAM, str(length), str(batch), str(interval)], ranks, hosts) as run:
            went_on = [run.kill_at_random(draw, full=False)[0] for _ in range(draw.randrange(1, 5))]
            assert run.finish() == 0, what + run.output()
            found, results = run.counts(), run.results()
        assert (found.lost, found.duplicated) == (0, 0), what
        for one in results:
            assert one["counters"] == [[key, one["steps"]] for key in range(7)], what
        samples = sum(map(sum, results[0]["used"]))
        records.append({"ranks": ranks, "hosts": hosts, "samples": samples, "epochs": len(results[0]["used"])})
        records[-1] |= {"went_on_s": went_on, "sizes": sorted(set(results[0]["sizes"])), **vars(found)}
    times = [seconds for record in records for seconds in record["went_on_s"]]
    print(
        f"seed {seed}: {RUNS} jobs, {len(times)} kills: lost 0, duplicated 0; training continued "
        f"after {max(times):.2f} s"
    )
    if os.environ.get("CHAOS_JSON"):
        Path(os.environ["CHAOS_JSON"]).write_text(json.dumps({"seed": seed, "jobs": records}, indent=1))


@pytest.mark.ranks
@pytest.mark.chaos
def test_row_4_the_loss_of_a_host_loses_no_sharded_part(tmp_path: Path) -> None:
    with ElasticRun(tmp_path, [PROGRAM, "60", "2", "3"], 4, "localhost:2,127.0.0.1:2") as run:
        for host in (1, 0):
            before = run.until(lambda now: now["size"] == 4)
            now = run.until(lambda now: now["step"] > before["step"] + 20)  # noqa: B023
            run.hurt_agent(2 * host, signal.SIGKILL)
            left = set(now["pids"][2:] if host == 0 else now["pids"][:2])
            run.until(lambda later: set(later["pids"]) == left and later["step"] > now["step"] + 20)  # noqa: B023
        assert run.finish() == 0, run.output()
        found, last = run.counts(), run.results()[0]
    assert (found.lost, found.duplicated) == (0, 0) and {2, 4} <= set(last["sizes"])
    assert last["counters"] == [[key, last["steps"]] for key in range(7)]


@pytest.mark.ranks
@pytest.mark.chaos
def test_row_23_parts_of_ranks_that_leave_are_taken_over(tmp_path: Path) -> None:
    with ElasticRun(tmp_path, [PROGRAM, "60", "2", "3"], 4, "localhost:2,127.0.0.1:2") as run:
        before = run.until(lambda now: now["size"] == 4 and now["step"] > 10)
        run.hurt_agent(3, signal.SIGTERM)
        run.until(lambda now: now["size"] == 2 and now["step"] > before["step"] + 20)
        assert run.finish() == 0, run.output()
        found, last = run.counts(), run.results()[0]
    assert (found.lost, found.duplicated) == (0, 0)
    assert last["counters"] == [[key, last["steps"]] for key in range(7)]


@pytest.mark.ranks
def test_a_lost_rank_ends_a_job_whose_ranks_are_fixed() -> None:
    body = """
from farandole.elastic import ObjectState, run
calls = []
@run
def train(state):
    calls.append(1)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.barrier()
hvd.init()
try:
    train(ObjectState(hvd.broadcast_object, hvd.rank, step=0))
except PeerLost as error:
    report(calls=len(calls), rank=error.rank)
"""
    with start(body, 3) as job:
        job.wait(60)
        assert [results(job, rank) for rank in (0, 2)] == [[{"calls": 1, "rank": 1}]] * 2
