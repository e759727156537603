# Real processes join, and one of them dies on the way or lacks descriptors: the others get an error with its rank.
# Touches processes.
from __future__ import annotations

import json
import time

import pytest
from local_ranks import start_ranks
from waiting import in_time

from farandole.launch import local

pytestmark = pytest.mark.ranks


def error_of(job: local.Job, rank: int) -> str:
    return str(json.loads(job.stdout(rank))["error"])


@pytest.mark.parametrize("hosts", [["a", "a", "a"], ["a", "a", "b"]])
def test_processes_join_and_get_their_links(hosts: list[str]) -> None:
    with start_ranks("plain", 3, hosts=hosts) as job:
        assert job.wait(60) == 0, job.stderr(0)
        found = [json.loads(job.stdout(rank)) for rank in range(3)]
    assert [one["hosts"] for one in found] == [[0, 0, hosts[2] != "a"]] * 3
    assert found[0]["kinds"] == {"1": 0, "2": int(hosts[2] != "a")}


def test_two_jobs_of_processes_at_once() -> None:
    with start_ranks("plain", 2) as one, start_ranks("plain", 2) as other:
        assert (one.wait(60), other.wait(60)) == (0, 0)


@pytest.mark.parametrize("hosts", [["a", "a", "a"], ["a", "b", "c"]])
@pytest.mark.parametrize("stage", ["wait_for", "link_locally", "link_remotely"])
def test_a_rank_that_dies_while_it_joins_is_named(stage: str, hosts: list[str]) -> None:
    with start_ranks(f"die:{stage}", 3, hosts=hosts, stop_on_failure=False) as job:
        assert job.wait(60) == 128 + 9
        for rank in (0, 1):
            # Who came too late to meet it hears from the launcher how it ended.
            died = f"rank 2 (process {job.pids[2]} on {hosts[2]}) died"
            assert died in error_of(job, rank) or "rank 2 has ended (killed by SIGKILL)" in error_of(job, rank)
        assert job.codes == [3, 3, 137] and job.failure == (2, 137)


def test_a_rank_that_never_comes_is_named_at_once() -> None:
    began = time.monotonic()
    with start_ranks("absent", 3, stop_on_failure=False) as job:
        assert job.wait(60) == 9
        for rank in (0, 1):
            assert "rank 2 has ended (exit code 9)" in error_of(job, rank)
    in_time(time.monotonic() - began, 20.0, "the end of ranks that miss one; the start timeout is 30 s, so it")


@pytest.mark.parametrize("spare", [1, 6])
def test_too_few_descriptors_are_named_with_the_fix(spare: int) -> None:
    with start_ranks(f"few:{spare}", 6, stop_on_failure=False) as job:
        assert job.wait(60) == 3
        assert "too few file descriptors" in error_of(job, 5) and "ulimit -n" in error_of(job, 5)
        for rank in range(5):
            assert "rank 5" in error_of(job, rank)
