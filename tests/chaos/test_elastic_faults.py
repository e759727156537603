# A short run of the driver of faults in elastic jobs, with a fixed seed; `make chaos` runs it at length.
# Touches what elastic_faults.py does.
"""CHAOS_N multiplies the counts."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
from elastic_faults import LIMITS, Record, cells, faults, p99, summary

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]
SEED = 20261115
N = int(os.environ.get("CHAOS_N", "1"))
SLACK = 10.0  # for what a busy machine adds to a handful of measurements; the driver's own report holds the limits


def check(records: list[Record], count: int) -> None:
    assert len(records) == count and all(record.fired for record in records)
    detect = [value for record in records for value in record.detect]
    recover = [record.recover for record in records if not math.isnan(record.recover)]
    assert detect and p99(detect) <= SLACK * LIMITS["detect"] and p99(recover) <= SLACK * LIMITS["recover"]


def test_row_1_kills_at_points_of_collectives_in_jobs_that_regrow(tmp_path: Path) -> None:
    records = cells(16 * N, SEED, tmp_path)
    summary("cells", records)
    check(records, 16 * N)
    assert any("data loaders" in record.what for record in records)


def test_rows_1_to_5_22_and_24_random_faults_one_after_the_other(tmp_path: Path) -> None:
    records = faults(8 * N, SEED, tmp_path)
    summary("faults", records)
    assert len({record.what for record in records}) >= 3  # of the kinds
    check(records, len(records))
