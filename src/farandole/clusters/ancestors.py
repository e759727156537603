# The processes above this one: their names, start times and arguments.
# Touches /proc.
"""Hydra's proxy is the only sign of an MPICH job. Its process id and start time identify it."""

from __future__ import annotations

import os
from dataclasses import dataclass

MOST = 64  # processes above this one that we look at


@dataclass(frozen=True)
class Process:
    """One process. `started` counts from the start of the machine, so that a reused number is not mistaken."""

    pid: int
    started: int
    name: str
    arguments: tuple[str, ...] = ()

    def option(self, name: str) -> str | None:
        """The argument after this one."""
        for index, argument in enumerate(self.arguments[:-1]):
            if argument == name:
                return self.arguments[index + 1]
        return None


def look(pid: int) -> tuple[Process, int] | None:
    """A process and the number of its parent, or None when it does not exist or is not visible."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            line = file.read().decode(errors="replace")
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            arguments = tuple(file.read().decode(errors="replace").split("\0"))
    except OSError:
        return None
    name = line[line.index("(") + 1 : line.rindex(")")]  # the name may contain blanks and parentheses
    fields = line[line.rindex(")") + 1 :].split()
    return Process(pid, int(fields[19]), name, arguments), int(fields[1])


def ancestors() -> list[Process]:
    """Parents, the nearest first."""
    found: list[Process] = []
    pid = os.getppid()
    while pid > 0 and len(found) < MOST and (seen := look(pid)) is not None:
        found.append(seen[0])
        pid = seen[1]
    return found


def kernel() -> str:
    """The boot of the kernel and the PID namespace. Where both are equal, a process id means the same process."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return "unknown"
