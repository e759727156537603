# Who is named as slow, and who is not, for shares of waiting that jobs show.
# Touches nothing.
"""rendezvous/stragglers.py, and its way through rounds."""

from __future__ import annotations

import pytest

from farandole.rendezvous.stragglers import Stragglers, report_seconds


def named(*judgements: list[float]) -> list[str]:
    """What is said when all ranks report these shares, one list after the other."""
    watch = Stragglers([f"rank {rank}" for rank in range(len(judgements[0]))])
    warnings = [watch.add_report(rank, share) for shares in judgements for rank, share in enumerate(shares)]
    return [text for text in warnings if text is not None]


SLOW = [0.9, 0.05, 0.85, 0.89]


def test_the_rank_that_all_wait_for_is_named_once() -> None:
    assert named(SLOW) == []  # once may be chance
    assert named(SLOW, SLOW, SLOW) == ["rank 1 is slow: the others wait for it 88% of the time"]


def test_a_rank_that_was_fast_in_between_is_reported_again() -> None:
    even = [0.2, 0.2, 0.1, 0.2]
    assert len(named(SLOW, SLOW, even, even, SLOW, SLOW)) == 2
    assert len(named(SLOW, SLOW, even, SLOW, SLOW)) == 1  # a moment is not meanwhile


def test_a_slow_host_is_all_of_its_ranks() -> None:
    shares = [0.7, 0.7, 0.1, 0.02, 0.8, 0.7]
    assert named(shares, shares) == ["rank 2, rank 3 are slow: the others wait for them 72% of the time"]


@pytest.mark.parametrize(
    "shares",
    [
        [0.8, 0.8, 0.75],  # the network is slow, not a rank
        [0.2, 0.4, 0.3],  # as ranks differ
        [0.9, 0.05, 0.05],  # most are no stragglers: one is early
        [0.0, 0.0, 0.0],
        [1.0, 1.0, 1.0],
        [0.5],
    ],
)
def test_no_rank_is_named_for_these_shares(shares: list[float]) -> None:
    assert named(shares, shares, shares) == []


def test_a_share_that_is_too_large_is_limited() -> None:
    assert named([7.0, -3.0], [7.0, -3.0]) == ["rank 1 is slow: the others wait for it 100% of the time"]


def test_large_jobs_report_less_often() -> None:
    assert report_seconds(2) == report_seconds(64) == 2.0 and report_seconds(3200) == 100.0
