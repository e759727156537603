# horovod.runner.common.util.hosts: hosts with slots, and the rank of each slot.
# Touches the hostfile that is named.
"""`get_host_assignments(parse_hosts("a:2,b:2"), 3)` returns a SlotInfo for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from farandole.launch import hosts, slots


@dataclass
class HostInfo:
    """A host and its number of slots."""

    hostname: str
    slots: int

    @staticmethod
    def from_string(host_string: str) -> HostInfo:
        """From "host:slots"."""
        [found] = parse_hosts(host_string)
        return found


@dataclass
class SlotInfo:
    """The numbers of one rank."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int | None = None
    local_size: int | None = None
    cross_size: int | None = None

    def to_response_string(self) -> str:
        """The numbers with commas: rank, size, local rank, local size, cross rank, cross size."""
        found = (self.rank, self.size, self.local_rank, self.local_size, self.cross_rank, self.cross_size)
        return ",".join(map(str, found))


INVALID_SLOT_INFO = SlotInfo("", -1, -1, -1, -1, -1, -1)


def parse_hosts(hosts_string: str) -> list[HostInfo]:
    """The hosts of "host:slots,host:slots". ValueError names a wrong entry.

    >>> parse_hosts("a:4,b:2")
    [HostInfo(hostname='a', slots=4), HostInfo(hostname='b', slots=2)]
    """
    return [HostInfo(one.name, one.slots) for one in hosts.parse(hosts_string)]


def parse_host_files(filename: str) -> str:
    """Converts the lines `host slots=n` of a file to "host:n,host:n"."""
    found = hosts.read(Path(filename).read_text(), filename)
    return ",".join(f"{one.name}:{one.slots}" for one in found)


def parse_hosts_and_slots(hosts: str) -> tuple[list[str], dict[str, int]]:
    """The names of the hosts in their order, and the slots of each host."""
    found = {one.hostname: one.slots for one in parse_hosts(hosts)}
    return list(found), found


def get_host_assignments(
    hosts: Sequence[HostInfo], min_num_proc: int, max_num_proc: int | None = None
) -> list[SlotInfo]:
    """The ranks of the slots, host by host, at most `max_num_proc`; ValueError when there are too few slots.

    >>> [(one.hostname, one.rank, one.local_rank) for one in get_host_assignments(parse_hosts("a:2,b:1"), 3)]
    [('a', 0, 0), ('a', 1, 1), ('b', 2, 0)]
    """
    every = [one.hostname for one in hosts for _ in range(one.slots)]
    if len(every) < min_num_proc:
        raise ValueError(f"Requested more processes ({min_num_proc}) than there are available slots ({len(every)})")
    return [
        SlotInfo(
            one.hostname,
            one.rank,
            one.local_rank,
            one.cross_rank,
            one.size,
            one.local_size,
            one.cross_size,
        )
        for one in slots.rank_numbers(every[:max_num_proc])
    ]
