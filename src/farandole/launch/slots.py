# From host names to places: who is which local and cross rank.
# Pure. Touches the names of settings alone.
"""A job is a list with the host name of each rank; everything else about places follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from farandole.config import SETTINGS


@dataclass(frozen=True)
class Place:
    """Where one rank stands; the fields are settings of the same name."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    hostname: str

    def environment(self) -> dict[str, str]:
        """The variables that tell a worker its place, under both of their names."""
        found = {}
        for name, value in asdict(self).items():
            for variable in SETTINGS[name].variables:
                found[variable] = str(value)
        return found


def places(hosts: Sequence[str]) -> list[Place]:
    """The place of each rank, given the host name of each.

    >>> [(place.local_rank, place.cross_rank) for place in places(["a", "a", "b"])]
    [(0, 0), (1, 0), (0, 1)]
    """
    order = list(dict.fromkeys(hosts))
    counts = {host: hosts.count(host) for host in order}
    found = []
    for rank, host in enumerate(hosts):
        local = hosts[:rank].count(host)
        # The hosts that have a rank with this local number, in the order of the list.
        across = [other for other in order if counts[other] > local]
        found.append(Place(rank, len(hosts), local, counts[host], across.index(host), len(across), host))
    return found
