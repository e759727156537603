# `make chaos N=10`: the fault matrix with all its cells, the property tests and the progress tests, ten times as long.
# Touches the same as tests/ranks.
"""The tests of tests/ranks that read CHAOS_N. `make test` runs them there, so it does not collect this file."""

from __future__ import annotations

from test_elastic_jobs import test_rows_7_and_37_a_rank_that_only_seems_dead_is_not_evicted  # noqa: F401
from test_elastic_ledger import test_row_25_random_losses_lose_and_repeat_nothing  # noqa: F401
from test_faults import test_killing_any_rank_at_any_point_is_seen_by_all_survivors  # noqa: F401
from test_launch_hosts import (  # noqa: F401
    test_rows_21_22_whoever_is_killed_nothing_is_left_on_any_host,
)
from test_processes import test_random_programs_on_real_ranks  # noqa: F401
from test_progress import (  # noqa: F401
    test_pipeline_of_sends_during_reductions,
    test_three_overlapping_pairs_in_cyclic_orders,
)
from test_properties import test_native  # noqa: F401
