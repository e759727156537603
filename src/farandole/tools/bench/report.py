"""From rows to the tables people read, as text and as Markdown.
Pure: numbers in, text out."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from .plan import PARTS, Row, Samples

OURS = "farandole"
STREAMS = ("plain TCP, both ways", "plain TCP, one way", "plain TCP, all at once")
COPIES = ("memcpy", "copy by all")
LIMITS = (*COPIES, *STREAMS, "kernel alone", "single", "single, in step", "in step, one copy", "import torch")
LEGEND = "2.0x: takes twice our time. 50 %: the limit takes half our time. ±: half of the middle half of the repeats."
TITLES = {
    "collectives": "Collectives by size (of the larger side; reused: the same tensor again, fresh: always a new one)",
    "crowd": "More ranks than cores",
    "halves": "16-bit floats beside float32, by bytes",
    "training": "Training steps (single: as many pinned processes as ranks, without any communication)",
    "memory": "Memory of a rank that trains",
    "start": "Starting two ranks",
    "life": "Joining and leaving",
    "idle": "A job that waits",
    "hosts": "Between hosts, links of 1 Gbit/s each way",
}


def size_name(count: int) -> str:
    """Bytes as text.

    >>> size_name(1024), size_name(67108864), size_name(100), size_name(138000000)
    ('1 KiB', '64 MiB', '100 B', '131.6 MiB')
    """
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count // unit} {name}" if count % unit == 0 else f"{count / unit:.1f} {name}"
    return f"{count} B"


def value_name(value: float, unit: str) -> str:
    """A measured value as text, with three digits.

    >>> value_name(0.0000123, "s"), value_name(0.0123, "s"), value_name(4.2, "s"), value_name(0.123, "%")
    ('12.3 µs', '12.3 ms', '4.2 s', '0.123 %')
    """
    if unit == "B":
        return f"{value / (1 << 20):.1f} MiB"
    if unit != "s":
        return f"{value:.3g} {unit}" if unit == "%" else f"{value:.3g}{unit}"
    for factor, name in ((1.0, "s"), (1e-3, "ms")):
        if value >= factor:
            return f"{value / factor:.3g} {name}"
    return f"{value * 1e6:.3g} µs"


def median(line: Row, name: str) -> float | None:
    """The median of a library's repeats; None if it was not measured."""
    samples: Samples = line["values"].get(name, [])
    return statistics.median(samples) if samples else None


def noise(samples: Samples) -> float | None:
    """Half of the interquartile range of the repeats, divided by the median; None with too few repeats.

    >>> noise([2.0, 2.0, 2.5, 1.5, 2.5, 2.0, 1.5]), noise([1.0])
    (0.25, None)
    """
    if len(samples) < 4:
        return None
    low, middle, high = statistics.quantiles(samples, n=4)
    return (high - low) / 2 / middle if middle else None


def spread(samples: Samples) -> str:
    """The noise as text.

    >>> spread([1.0, 1.0, 1.1, 0.9, 1.0, 1.0, 1.0])
    '±0 %'
    """
    found = noise(samples)
    return "" if found is None else f"±{found * 100:.0f} %"


def label(line: Row) -> list[str]:
    """What a row is about."""
    words = [line["what"]]
    if line.get("dtype", "float32") != "float32" or line["part"] == "halves":
        words.append(line["dtype"])
    if "hosts" in line:
        words.append(f"{line['hosts']} hosts x {line['ranks'] // line['hosts']}")
    else:
        words.append(f"{line['ranks']} ranks" if line["ranks"] > 1 else "1 rank")
    if line["part"] not in ("training", "memory") and "bytes" in line:
        words.append(size_name(line["bytes"]))
    if line["part"] == "collectives":
        words.append(line["kind"])
    return words


def cells(line: Row, names: Sequence[str]) -> list[str]:
    """Value, spread and ratio of each library: how many times our time it takes; for a limit, its share of our time."""
    base = next((name for name in names if name.startswith(OURS) and median(line, name) is not None), "")
    ours = median(line, base)
    found = []
    for name in names:
        value = median(line, name)
        if value is None:
            found.append("")
            continue
        text = value_name(value, line["unit"])
        if name.startswith(OURS) and line["unit"] == "s" and "bytes" in line and line["part"] not in ("training",):
            text += f", {line['bytes'] / value / 1e9:.3g} GB/s"
        if name == base or not ours:
            text += f" {spread(line['values'][name])}".rstrip()
        elif name in LIMITS:
            text += f" ({value / ours * 100:.0f} %)" if line["unit"] == "s" else ""
        elif line["unit"] in ("s", "%", "/s") and not name.startswith(OURS):
            text += f" ({value / ours:.1f}x)"
        found.append(text)
    return found


def grid(rows: Sequence[Row]) -> list[list[str]]:
    """The lines of one part's table, the head first."""
    names: list[str] = []
    for line in rows:
        names += [name for name in line["values"] if name not in names]
    names.sort(key=lambda name: (not name.startswith(OURS), name != OURS, name in LIMITS))
    return [["", *names], *([" ".join(label(line)), *cells(line, names)] for line in rows)]


def text(lines: Sequence[Sequence[str]]) -> str:
    """For a terminal."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [lines[0], rule, *lines[1:]]
    )


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """For a page."""
    rule = ["---"] * len(lines[0])
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]])


def tables(rows: Sequence[Row], form: Callable[[Sequence[Sequence[str]]], str] = text) -> str:
    """Every part that was measured."""
    found = []
    for part in PARTS:
        chosen = [line for line in rows if line["part"] == part]
        if chosen and part in TITLES:
            found.append(f"{TITLES[part]}\n\n{form(grid(chosen))}")
    return "\n\n".join(found)
