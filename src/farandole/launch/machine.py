# What this host allows its processes: cores by affinity and by the quota of control groups.
# Reads /proc and /sys/fs/cgroup; needs nothing but the standard library, since agents start with nothing else.
"""`usable_cores()` is what a host's ranks share."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path


def usable_cores() -> int:
    """Whole cores that this process and its children may keep busy; at least one."""
    return max(1, int(min(len(os.sched_getaffinity(0)), quota())))


def quota() -> float:
    """How many cores the control group allows this process, as far as it says; else infinity."""
    least = math.inf
    for line in lines("/proc/self/cgroup"):
        _, controllers, place = line.split(":", 2)
        if not controllers:  # version 2
            for folder in _upwards("/sys/fs/cgroup", place):
                share, _, period = first_line(folder / "cpu.max").partition(" ")
                if share.isdigit() and period.isdigit():
                    least = min(least, int(share) / int(period))
        elif "cpu" in controllers.split(","):
            for folder in _upwards("/sys/fs/cgroup/cpu", place):
                share, period = first_line(folder / "cpu.cfs_quota_us"), first_line(folder / "cpu.cfs_period_us")
                if share.isdigit() and period.isdigit() and int(period):
                    least = min(least, int(share) / int(period))
    return least


def _upwards(root: str, place: str) -> Iterator[Path]:
    """A group's folder and those above it; a container may see its own group as the root."""
    folder = Path(root + place) if Path(root + place).is_dir() else Path(root)
    yield folder
    for above in folder.parents:
        if above.is_relative_to(root):
            yield above


def lines(path: str) -> list[str]:
    """Of a file; none where it cannot be read."""
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return []


def first_line(path: Path) -> str:
    """Of a file; nothing where there is none."""
    return next(iter(lines(str(path))), "")
