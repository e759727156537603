# Host names and slots become the ranks and local ranks of processes.
# Touches only slots.py.
from __future__ import annotations

import pytest

from farandole.base.config import Config
from farandole.launch.slots import rank_numbers


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("a", [(0, 1, 0, 1)]),
        ("aa", [(0, 2, 0, 1), (1, 2, 0, 1)]),
        ("aab", [(0, 2, 0, 2), (1, 2, 0, 1), (0, 1, 1, 2)]),
        ("abab", [(0, 2, 0, 2), (0, 2, 1, 2), (1, 2, 0, 2), (1, 2, 1, 2)]),
        ("abbb", [(0, 1, 0, 2), (0, 3, 1, 2), (1, 3, 0, 1), (2, 3, 0, 1)]),
    ],
)
def test_ranks_of_hosts_and_slots(hosts: str, expected: list[tuple[int, int, int, int]]) -> None:
    found = rank_numbers(hosts)
    assert [(p.local_rank, p.local_size, p.cross_rank, p.cross_size) for p in found] == expected
    for rank, numbers in enumerate(found):
        config = Config.from_environment(numbers.environment())
        assert (config.rank, config.size, config.hostname) == (rank, len(hosts), hosts[rank])
        assert (config.local_rank, config.local_size, config.cross_rank, config.cross_size) == expected[rank]
        assert numbers.environment()["HOROVOD_RANK"] == numbers.environment()["FARANDOLE_RANK"] == str(rank)
