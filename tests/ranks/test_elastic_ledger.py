# Random losses in elastic jobs, and what stands behind the model afterwards: samples, and sharded state.
# Touches elastic_runs.py and elastic_counting.py.
"""Half of the jobs have two hosts, which are two names of this one. `make chaos N=15` makes it 60 jobs."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from elastic_runs import ElasticRun

PROGRAM = str(Path(__file__).parent / "elastic_counting.py")
RUNS = 4 * int(os.environ.get("CHAOS_N", "1"))


@pytest.mark.ranks
@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.timeout(60 + 30 * RUNS)
def test_row_25_random_losses_lose_and_repeat_nothing(tmp_path: Path) -> None:
    seed = int(os.environ.get("CHAOS_SEED", "25"))
    draw = random.Random(seed)
    kills = samples = 0
    slowest = 0.0
    for number in range(RUNS):
        length, batch, interval = draw.randrange(20, 200), draw.randrange(1, 6), draw.randrange(1, 8)
        ranks = draw.randrange(2, 5)
        hosts = "" if number % 2 else f"localhost:{(ranks + 1) // 2},127.0.0.1:{ranks // 2}"
        what = f"seed {seed}, run {number}: {ranks} ranks, {length} samples, {batch}, commits every {interval}"
        with ElasticRun(tmp_path / str(number), [PROGRAM, str(length), str(batch), str(interval)], ranks, hosts) as run:
            for _ in range(draw.randrange(1, 5)):
                slowest = max(slowest, run.kill_at_random(draw, full=False)[0])
                kills += 1
            assert run.finish() == 0, what + run.words()
            found, results = run.verdict(), run.results()
        assert (found.lost, found.duplicated) == (0, 0), what
        for one in results:
            assert one["counters"] == [[key, one["steps"]] for key in range(7)], what
        samples += sum(map(sum, results[0]["used"]))
    print(f"seed {seed}: {RUNS} jobs, {kills} kills, {samples} samples: lost 0, duplicated 0; on after {slowest:.2f} s")
