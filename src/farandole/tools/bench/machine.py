"""The machine of a run: what a reader needs to judge the numbers. No host names, no paths.
Reads /proc and package metadata."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

from ...base.errors import LibraryMissing
from ...base.version import package_version
from .. import env


def memory_bytes() -> int:
    """Installed memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def busy(seconds: float = 0.5) -> float:
    """How many cores other programs use now: a busy machine explains a bad number."""

    def working() -> int:
        first = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
        ticks = [int(word) for word in first[:8]]
        return sum(ticks) - ticks[3] - ticks[4]

    before, began = working(), time.monotonic()
    time.sleep(seconds)
    return (working() - before) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - began)


def facts() -> dict[str, Any]:
    """Everything, for the JSON file."""
    try:
        kernels = env.kernels()
    except LibraryMissing:
        kernels = "no native library"
    versions = {name: env.version_of(name) for name in ("numpy", "torch", "mpi4py")}
    return {
        "architecture": platform.machine(),
        "processor": env.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes() / (1 << 30)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "farandole": package_version(),
        "kernels": kernels,
        "versions": {name: version for name, version in versions.items() if version},
    }
