# 10,000 random faults against the driver, in virtual time: no split brain, no lost commit, no deadlock.
# Pure; see simulation.py.
"""A seed that fails replays: `Simulation(seed).run(FAULTS_PER_RUN)`."""

from __future__ import annotations

from collections import Counter

import pytest
from simulation import Simulation

FAULTS = 10_000
FAULTS_PER_RUN = 25


@pytest.mark.timeout(120)
def test_rows_1_to_13_and_21_to_24_in_virtual_time() -> None:
    seed = faults = generations = commits = 0
    ends: Counter[str] = Counter()
    while faults < FAULTS:
        run = Simulation(seed)
        try:
            over = run.run(FAULTS_PER_RUN)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, after {run.faults} faults, at {run.now:.3f} s: {error}") from error
        assert over is None or over.failed or run.driver.state.drained  # no job succeeded
        ends[over.text[:40] if over is not None else "running"] += 1
        seed += 1
        faults += run.faults
        generations += len(run.began)
        commits += len(run.committed)
    print(f"{faults} faults in {seed} jobs: {generations} generations, {commits} commits, {dict(ends)}")
    assert ends["running"] > seed // 3  # most of the faults hit running jobs
    assert generations > faults // 10 and commits > faults
