# How many cores this process may use, by its affinity and by the quota of control groups.
# Reads /proc and /sys/fs/cgroup; uses only the standard library, because agents start without other packages.
"""`usable_cores()` is the number of cores that the ranks of a host share."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path


def usable_cores() -> int:
    """The whole cores that this process and its children may use; at least one."""
    return max(1, int(min(len(os.sched_getaffinity(0)), quota())))


def quota() -> float:
    """How many cores the control group allows this process; infinity if there is no limit."""
    lowest = math.inf
    for line in lines("/proc/self/cgroup"):
        _, controllers, group = line.split(":", 2)
        if not controllers:  # version 2
            for folder in _group_folders("/sys/fs/cgroup", group):
                allowed, _, period = first_line(folder / "cpu.max").partition(" ")
                if allowed.isdigit() and period.isdigit():
                    lowest = min(lowest, int(allowed) / int(period))
        elif "cpu" in controllers.split(","):
            for folder in _group_folders("/sys/fs/cgroup/cpu", group):
                allowed, period = first_line(folder / "cpu.cfs_quota_us"), first_line(folder / "cpu.cfs_period_us")
                if allowed.isdigit() and period.isdigit() and int(period):
                    lowest = min(lowest, int(allowed) / int(period))
    return lowest


def _group_folders(root: str, group: str) -> Iterator[Path]:
    """A group's folder and the folders above it. In a container, the process's group may be shown as the root."""
    folder = Path(root + group) if Path(root + group).is_dir() else Path(root)
    yield folder
    for above in folder.parents:
        if above.is_relative_to(root):
            yield above


def lines(path: str) -> list[str]:
    """The lines of a file; none if it cannot be read."""
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return []


def first_line(path: Path) -> str:
    """The first line of a file; "" if there is none."""
    return next(iter(lines(str(path))), "")
