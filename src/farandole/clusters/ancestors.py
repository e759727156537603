# The processes above this one: their names, start times and arguments.
# Touches /proc.
"""A job of MPICH is known only by the proxy process of its launcher Hydra, above the ranks. The proxy's process id and
start time identify the job."""

from __future__ import annotations

import os
from dataclasses import dataclass

MAX_ANCESTORS = 64


@dataclass(frozen=True)
class Process:
    """One process. `started`: clock ticks since the machine started; it tells processes with the same id apart."""

    pid: int
    started: int
    name: str
    arguments: tuple[str, ...] = ()

    def option(self, name: str) -> str | None:
        """The argument that follows this option."""
        for index, argument in enumerate(self.arguments[:-1]):
            if argument == name:
                return self.arguments[index + 1]
        return None


def read_process(pid: int) -> tuple[Process, int] | None:
    """A process and the id of its parent; None if it does not exist or is not visible."""
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
    """The processes above this one, its parent first."""
    found: list[Process] = []
    pid = os.getppid()
    while pid > 0 and len(found) < MAX_ANCESTORS and (seen := read_process(pid)) is not None:
        found.append(seen[0])
        pid = seen[1]
    return found


def pid_namespace() -> str:
    """The boot of the kernel and the PID namespace. Where both are equal, a process id means the same process."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return "unknown"
