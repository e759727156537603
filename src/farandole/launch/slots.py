# Computes the local rank and the cross rank of each rank from the host names.
# Pure. Touches only the names of settings.
"""The input is a list with the host name of each rank; all other numbers follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from farandole.base.config import SETTINGS


@dataclass(frozen=True)
class RankNumbers:
    """The numbers of one rank. Each field is a setting of the same name."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    hostname: str

    def environment(self) -> dict[str, str]:
        """The variables that tell a worker its numbers, with our names and Horovod's names."""
        found = {}
        for name, value in asdict(self).items():
            for variable in SETTINGS[name].variables:
                found[variable] = str(value)
        return found


def rank_numbers(hosts: Sequence[str]) -> list[RankNumbers]:
    """The numbers of each rank, from the host name of each.

    >>> [(one.local_rank, one.cross_rank) for one in rank_numbers(["a", "a", "b"])]
    [(0, 0), (1, 0), (0, 1)]
    """
    order = list(dict.fromkeys(hosts))
    counts = {host: hosts.count(host) for host in order}
    found = []
    for rank, host in enumerate(hosts):
        local = hosts[:rank].count(host)
        # The hosts that have a rank with this local rank, in the order of the list.
        across = [other for other in order if counts[other] > local]
        found.append(RankNumbers(rank, len(hosts), local, counts[host], across.index(host), len(across), host))
    return found
