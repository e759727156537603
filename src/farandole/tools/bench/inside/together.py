"""Ranks begin an operation at the same moment, whatever library is measured: a barrier of counters in a shared file.
Touches one memory-mapped file; it orders time alone, never data."""

from __future__ import annotations

import mmap
import os

LINE = 8  # counters stand a cache line apart: 8 numbers of 8 bytes


class Together:
    """One rank's end of the barrier of `size` ranks."""

    def __init__(self, path: str, rank: int, size: int) -> None:
        bytes_needed = size * LINE * 8
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.truncate(descriptor, bytes_needed)
            self._map = mmap.mmap(descriptor, bytes_needed)
        finally:
            os.close(descriptor)
        self._counts = memoryview(self._map).cast("q")
        self._mine = rank * LINE
        self._others = [other * LINE for other in range(size) if other != rank]
        self._count = 0

    def wait(self) -> None:
        """Returns when every rank has come."""
        counts = self._counts
        self._count += 1
        counts[self._mine] = count = self._count
        for other in self._others:
            looks = 0
            while counts[other] < count:
                looks += 1
                if looks > 200:
                    os.sched_yield()  # there may be more ranks than cores
