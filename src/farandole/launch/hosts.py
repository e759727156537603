# Reads hosts and their slots from -H or a hostfile, and chooses the host of each rank.
# Pure: the input is text.
"""`parse("a:4,b:2")` and `read(text)` return hosts; `assign(hosts, np)` returns the host of each rank."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from farandole.launch.ssh import check

MAX_SLOTS = 4096
MAX_HOSTS = 65536
_LINE = re.compile(r"(?P<host>\S+?)(?:\s+slots\s*=\s*(?P<slots>\S+))?(?P<rest>\s+\S.*)?")


@dataclass(frozen=True)
class Host:
    """A host and its number of slots."""

    name: str
    slots: int


def parse(text: str) -> list[Host]:
    """The hosts from `-H`: names with slots; without a number a host has one slot. ValueError names a wrong entry.

    >>> parse("a:4,b")
    [Host(name='a', slots=4), Host(name='b', slots=1)]
    """
    found = []
    for entry in text.split(","):
        if not entry.strip():
            raise ValueError(f"-H {text}: an entry is empty; expected host:slots,host:slots")
        found.append(_entry(entry.strip(), f"-H {text}"))
    return _merge(found)


def read(text: str, name: str) -> list[Host]:
    """The hosts from a hostfile: each line has a host with `slots=n`, else with one slot. ValueError names the line."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        where = f"{name}, line {number}"
        match = _LINE.fullmatch(words)
        assert match is not None  # the pattern accepts any word as a host
        if match["rest"]:
            raise ValueError(f"{where}: {words!r}: expected `host slots=n`")
        if match["slots"] is not None:
            found.append(Host(_host(match["host"], where), _slots(match["slots"], where)))
        else:
            found.append(_entry(match["host"], where))
        if len(found) > MAX_HOSTS:
            raise ValueError(f"{name}: more than {MAX_HOSTS} hosts")
    if not found:
        raise ValueError(f"{name} names no host; expected lines like `host slots=4`")
    return _merge(found)


def assign(hosts: Sequence[Host], np: int) -> list[str]:
    """The host of each rank. Each host is filled before the next one. ValueError when there are too few slots.

    >>> assign([Host("a", 2), Host("b", 4)], 3)
    ['a', 'a', 'b']
    """
    every = [host.name for host in hosts for _ in range(host.slots)]
    if np > len(every):
        listed = ", ".join(f"{host.name}:{host.slots}" for host in hosts[:8]) + (" ..." if len(hosts) > 8 else "")
        have = f"{len(every)} slot{'s' if len(every) > 1 else ''}"
        example = f"{hosts[0].name}:{hosts[0].slots + np - len(every)}"
        raise ValueError(
            f"-np {np}, but the hosts have only {have} ({listed}). A host without a number has one slot, which is room "
            f"for one rank: write {example}, for example, or a smaller -np"
        )
    return every[:np]


def _entry(entry: str, where: str) -> Host:
    """The host of one entry: `host`, `host:slots`, or `[IPv6 address]:slots`."""
    name, colon, slots = entry.rpartition(":")
    if not colon or entry.endswith("]") or (entry.count(":") > 1 and not name.endswith("]")):
        return Host(_host(entry, where), 1)
    return Host(_host(name, where), _slots(slots, where))


def _host(name: str, where: str) -> str:
    bare = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    try:
        check(bare)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return bare


def _slots(text: str, where: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 0 < int(text) <= MAX_SLOTS):
        raise ValueError(f"{where}: {text!r} is not a number of slots; expected 1 to {MAX_SLOTS}")
    return int(text)


def _merge(hosts: Sequence[Host]) -> list[Host]:
    """Joins entries of the same host: their slots are added."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return [Host(name, count) for name, count in slots.items()]
