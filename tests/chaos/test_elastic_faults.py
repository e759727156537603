# A short run of the driver of faults in elastic jobs, with a fixed seed; `make chaos` makes longer runs.
# Touches the same as elastic_faults.py.
"""CHAOS_N multiplies the numbers of faults."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
from elastic_cells import cells, cells_between_hosts
from elastic_depths import DEPTH, nested, saves
from elastic_faults import faults
from elastic_records import LIMITS, LIMITS_OF, Record, p99, summary
from waiting import in_time

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]
SEED = 20261115
N = int(os.environ.get("CHAOS_N", "1"))
SLACK = 10.0  # a busy machine delays a few measurements; the report of `make chaos` checks the real limits


def check(records: list[Record], count: int, limits: dict[str, float] = LIMITS) -> None:
    assert len(records) == count and all(record.fired for record in records)
    detect = [value for record in records for value in record.detect]
    assert detect
    recover = [record.recover for record in records if not math.isnan(record.recover)]
    in_time(p99(detect), SLACK * limits["detect"], "detecting a death (p99)")
    in_time(p99(recover), SLACK * limits["recover"], "continuing after a death (p99)")


def test_row_1_kills_at_points_of_collectives_in_jobs_that_regrow(tmp_path: Path) -> None:
    records = cells(16 * N, SEED, tmp_path)
    summary("cells", records)
    check(records, 16 * N)
    assert any("data loaders" in record.what for record in records)


def test_row_1_kills_at_points_of_collectives_between_hosts(tmp_path: Path) -> None:
    """Each rank has its own host, with its own network and processes."""
    records = cells_between_hosts(4 * N, SEED, tmp_path)
    summary("hosts", records)
    check(records, 4 * N, LIMITS_OF["hosts"])


def test_row_2_deaths_inside_recoveries_five_deep(tmp_path: Path) -> None:
    records = nested(N, SEED, tmp_path, least=DEPTH)
    summary("nested", records)
    assert len(records) == N and all(record.what.startswith(f"depth {DEPTH}") for record in records)
    in_time(max(record.recover for record in records), SLACK * LIMITS_OF["nested"]["recover"], "continuing")


def test_row_23_every_rank_saves_once_before_one_leaves(tmp_path: Path) -> None:
    """A thousand saves with `make chaos`."""
    records = saves(16 * N, SEED, tmp_path)
    assert records[-1].note == f"{16 * N} saves"


def test_rows_1_to_5_22_and_24_random_faults_one_after_the_other(tmp_path: Path) -> None:
    records = faults(8 * N, SEED, tmp_path)
    summary("faults", records)
    assert len({record.what for record in records}) >= 3  # different kinds of faults
    check(records, len(records))
