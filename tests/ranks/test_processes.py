# The property test between real processes: the launcher, the rendezvous, shared memory by passed files, real TCP.
# Touches the package through its public functions.
"""A pool of ranks per topology; hypothesis in the parent makes the programs."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from pool import Pool
from programs import Program, check_program, programs
from test_properties import groups_of
from world import ENGINES

EXAMPLES = 25 * int(os.environ.get("CHAOS_N", "1"))
PYTHON = {"FARANDOLE_ENGINE": "python"}
RING = {"FARANDOLE_ALLREDUCE_ALGORITHM": "ring"}
TOPOLOGIES = {
    "1": ("a", {}),
    "2-shm": ("aa", {}),
    "3-tcp": ("abc", {}),
    "4-both": ("aabb", {}),
    "5-ring": ("ababc", RING),
    "8-shm": ("aaaaaaaa", {}),
    "3-python": ("aba", PYTHON),
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", [name for name in TOPOLOGIES if "native" in ENGINES or "python" in name])
def test_random_programs_on_real_ranks(name: str) -> None:
    hosts, env = TOPOLOGIES[name]
    numbers = [sorted(set(hosts), key=hosts.index).index(host) for host in hosts]
    sets = groups_of(len(hosts))
    pool = Pool(list(hosts), sets, env)

    @settings(
        max_examples=EXAMPLES if env is not PYTHON else EXAMPLES // 3,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs(sets, barriers=False))
    def holds(program: Program) -> None:
        check_program(program, pool.run(program), numbers, env is RING)

    try:
        holds()
        assert pool.close() == 0
    finally:
        pool.abandon()
