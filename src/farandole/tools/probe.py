# The program that `farandole doctor` starts on every host: joins, measures links, and reports the host's versions.
# Touches the job only through the public interface; rank 0 prints one line of JSON.
"""`python -m farandole.tools.probe`, as the command of a job."""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from typing import Any

import numpy as np

import farandole
from farandole.base.version import package_version
from farandole.tools import env
from farandole.world.runtime import runtime

PINGS = 50
LARGE = 8 << 20
LARGE_TURNS = 3
EVERY_PAIR = 8  # up to so many ranks measure every pair; with more, each measures only the link to the next rank
MARK = "farandole-probe "  # the beginning of the line that doctor reads


def pairs(size: int) -> list[tuple[int, int]]:
    """The pairs of ranks that measure their link, one pair after the other.

    >>> pairs(3)
    [(0, 1), (0, 2), (1, 2)]
    """
    if size <= EVERY_PAIR:
        return [(a, b) for a in range(size) for b in range(a + 1, size)]
    return [(a, a + 1) for a in range(size - 1)]


def measure(me: int, peer: int, first: bool) -> dict[str, Any]:
    """Latency (half a round trip, least and median), rate and clock difference of a peer. The first rank measures."""
    # The peer sends its wall clock back with each ping.
    tick, remote_time = np.zeros(1), np.zeros(1)
    trips, offsets = [], []
    for _ in range(PINGS):
        if first:
            began, stamp = time.perf_counter(), time.time()
            farandole.send(tick, peer)
            farandole.recv(remote_time, peer)
            trip = time.perf_counter() - began
            trips.append(trip)
            offsets.append(float(remote_time[0]) - stamp - trip / 2)
        else:
            farandole.recv(tick, peer)
            farandole.send(np.array([time.time()]), peer)
    block, seconds = np.zeros(LARGE, np.uint8), []
    for _ in range(LARGE_TURNS):
        began = time.perf_counter()
        if first:
            farandole.send(block, peer)
            farandole.recv(tick, peer)
            seconds.append(time.perf_counter() - began)
        else:
            farandole.recv(block, peer)
            farandole.send(tick, peer)
    if not first:
        return {}
    best = trips.index(min(trips))
    return {
        "pair": [me, peer],
        "latency_us": min(trips) / 2 * 1e6,
        "typical_us": statistics.median(trips) / 2 * 1e6,
        "rate": LARGE / min(seconds),
        "clock_ms": offsets[best] * 1e3,
    }


def about() -> dict[str, Any]:
    """The versions of this rank. doctor reports differences between ranks."""
    versions = {name: found for name in ("numpy", "torch", "tensorflow", "jax") if (found := env.version_of(name))}
    return {
        "host": runtime.world.config.hostname,
        "python": platform.python_version(),
        "farandole": package_version(),
        "kernels": env.kernels(),
        "cores": env.cores(),
        **versions,
    }


def main() -> int:
    """Runs the probe in one rank."""
    farandole.init()
    me, size = farandole.rank(), farandole.size()
    total = farandole.allreduce(np.full(1000, me + 1.0), op=farandole.Sum, name="probe")
    right = bool((total == size * (size + 1) / 2).all())
    measured = []
    for a, b in pairs(size):
        farandole.barrier()
        if me in (a, b):
            measured.append(measure(me, b if me == a else a, me == a))
    found = farandole.allgather_object({"about": about(), "measured": [one for one in measured if one], "right": right})
    if me == 0:
        print(MARK + json.dumps(found), flush=True)
    farandole.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
