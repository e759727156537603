"""From raw measurements to the tables people read.
Pure: numbers in, text out."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Samples = Sequence[float]


def size_name(count: int) -> str:
    """Bytes for people.

    >>> size_name(1024), size_name(67108864), size_name(100)
    ('1 KiB', '64 MiB', '100 B')
    """
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit and count % unit == 0:
            return f"{count // unit} {name}"
    return f"{count} B"


def parse_size(text: str) -> int:
    """The inverse, a bit more lenient.

    >>> parse_size("1KiB"), parse_size("64M"), parse_size("100")
    (1024, 67108864, 100)
    """
    bare = text.strip().lower().removesuffix("ib").removesuffix("b").strip()
    unit = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}.get(bare[-1:], 1)
    return int(bare.rstrip("kmg")) * unit


def time_name(seconds: float) -> str:
    """Seconds for people, three digits.

    >>> time_name(0.0000123), time_name(0.0123)
    ('12.3 µs', '12.3 ms')
    """
    return f"{seconds * 1e6:.3g} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


def row(size: int, times: Mapping[str, Samples]) -> list[str]:
    """One size: our time and rate, each peer's time, and how many times longer the peer takes (memcpy: we take)."""
    median = {name: statistics.median(samples) for name, samples in times.items()}
    ours = median["farandole"]
    cells = [size_name(size), time_name(ours), f"{size / ours / 1e9:.2f}"]
    for name in peers(times):
        cells += [time_name(median[name]), f"{median[name] / ours:.1f}x"]
    cells += [time_name(median["memcpy"]), f"{ours / median['memcpy']:.1f}x"]
    return cells


def peers(times: Mapping[str, Samples]) -> list[str]:
    """Everyone we are compared with, but for memcpy, which is a limit."""
    return [name for name in times if name not in ("farandole", "memcpy")]


def table(results: Sequence[Mapping[str, Any]], kind: str) -> str:
    """The table of one kind ("reused" or "fresh") over all sizes."""
    rows = [row(result["bytes"], result[kind]) for result in results]
    heads = ["size", "farandole", "GB/s"]
    for name in peers(results[0][kind]):
        heads += [name, f"{name} / farandole"]
    heads += ["memcpy", "farandole / memcpy"]
    widths = [max(len(line[column]) for line in [heads, *rows]) for column in range(len(heads))]
    lines = [heads, ["-" * width for width in widths], *rows]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
