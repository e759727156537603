"""Pictures of a run: bandwidth and latency against size, efficiency against ranks, and one training step.
Needs matplotlib; writes PNG files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .plan import Row
from .processes import Failed
from .report import median, size_name

COLOURS = {"farandole": "#b5321f", "farandole (NumPy)": "#e39a8d", "Gloo": "#2b6ca3", "MPI": "#5a9e4b"}
GREYS = {"memcpy": "#222222", "copy by all": "#888888"}
EFFICIENCY = (
    ("farandole", "#b5321f", "-", "o"),
    ("DDP on Gloo", "#2b6ca3", "-", "o"),
    ("other Horovod", "#996699", "-", "o"),
    ("single, in step", "#888888", "--", ""),
)
WAITING, MOVING = "#d9c27a", "#b5321f"


def matplotlib() -> Any:
    """The module, without a screen."""
    try:
        import matplotlib
        from matplotlib import pyplot
    except ImportError:
        raise Failed("plots need matplotlib: pip install 'farandole[bench]'") from None
    matplotlib.use("Agg")
    return pyplot


def draw(rows: Sequence[Row], folder: Path, prefix: str = "") -> list[Path]:
    """Every picture that the rows are good for; the files."""
    pyplot = matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for name, figure in pictures(pyplot, rows):
        path = folder / f"{prefix}{name}.png"
        figure.savefig(path, dpi=110, bbox_inches="tight")
        pyplot.close(figure)
        found.append(path)
    return found


def pictures(pyplot: Any, rows: Sequence[Row]) -> Iterator[tuple[str, Any]]:
    """Names and figures."""
    allreduce = [row for row in rows if row["part"] == "collectives" and row["what"] == "allreduce"]
    if allreduce:
        yield "bandwidth", by_size(pyplot, allreduce, "GB/s of tensor", lambda size, time: size / time / 1e9)
        yield "latency", by_size(pyplot, allreduce, "µs", lambda size, time: time * 1e6)
    training = [row for row in rows if row["part"] == "training"]
    if training:
        yield "efficiency", efficiency(pyplot, training)
    for row in rows:
        if row["part"] == "trace":
            yield "step", step(pyplot, row)


def by_size(pyplot: Any, rows: Sequence[Row], unit: str, value: Callable[[int, float], float]) -> Any:
    """One panel per number of ranks; the tensor is used again, the results go in place."""
    counts = sorted({row["ranks"] for row in rows})
    figure, panels = pyplot.subplots(1, len(counts), figsize=(1 + 4.2 * len(counts), 3.6), squeeze=False, sharey=True)
    for panel, ranks in zip(panels[0], counts, strict=True):
        chosen = sorted(
            (row for row in rows if row["ranks"] == ranks and row["kind"] == "reused"), key=lambda row: row["bytes"]
        )
        names = list(dict.fromkeys(name for row in chosen for name in row["values"]))
        for name in names:
            points = [(row["bytes"], median(row, name)) for row in chosen]
            known = [(size, value(size, time)) for size, time in points if time]
            style = "--" if name in GREYS else "-"
            colour = COLOURS.get(name, GREYS.get(name, "#996699"))
            panel.plot(*zip(*known, strict=True), style, marker=".", color=colour, label=name)
        panel.set(xscale="log", yscale="log", xlabel="bytes", title=f"allreduce, {ranks} ranks")
        sizes = [row["bytes"] for row in chosen]
        panel.set_xticks(sizes, [size_name(size) for size in sizes], rotation=60, fontsize=7)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel(unit)
    panels[0][-1].legend(fontsize=7)
    return figure


def efficiency(pyplot: Any, rows: Sequence[Row]) -> Any:
    """Step time of single processes over step time of ranks, for each case; and over that of ranks merely in step."""
    cases = list(dict.fromkeys(row["what"] for row in rows))
    figure, panels = pyplot.subplots(1, len(cases), figsize=(1 + 3.4 * len(cases), 3.2), squeeze=False, sharey=True)
    for panel, case in zip(panels[0], cases, strict=True):
        chosen = sorted((row for row in rows if row["what"] == case), key=lambda row: row["ranks"])
        for name, colour, line, marker in EFFICIENCY:
            points = [(row["ranks"], median(row, "single"), median(row, name)) for row in chosen]
            known = [(ranks, 100 * single / ours) for ranks, single, ours in points if single and ours]
            if known:
                panel.plot(*zip(*known, strict=True), linestyle=line, marker=marker, color=colour, label=name)
        panel.axhline(100, color="#888888", linewidth=0.8)
        panel.set(xscale="log", xlabel="ranks", title=case, ylim=(0, 130))
        counts = [row["ranks"] for row in chosen]
        panel.set_xticks(counts, [str(count) for count in counts])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("efficiency, %")
    panels[0][-1].legend(fontsize=8)
    return figure


def step(pyplot: Any, row: Row) -> Any:
    """Rank 0's phases above, and below a line for each bucket: waiting for others, queueing, moving."""
    phases, spans = row["facts"]["phases"], row["facts"]["spans"]
    tensors = list(dict.fromkeys(tensor for tensor, *_ in spans))
    figure, panel = pyplot.subplots(figsize=(9, 1.2 + 0.16 * len(tensors)))
    for (name, since, until), colour in zip(phases, ("#9fb8ad", "#7a9e9f", "#4f6367"), strict=True):
        panel.barh(-1, (until - since) / 1e3, left=since / 1e3, height=1.2, color=colour)
        panel.text((since + until) / 2e3, -1, name, ha="center", va="center", fontsize=7, color="white")
    for tensor, what, since, until in spans:
        colour = MOVING if what.endswith("_ALLREDUCE") and not what.startswith("NEGOTIATE") else WAITING
        panel.barh(tensors.index(tensor), (until - since) / 1e3, left=since / 1e3, height=0.8, color=colour)
    panel.set_yticks(range(len(tensors)), [tensor.removeprefix("allreduce.")[:40] for tensor in tensors], fontsize=5)
    panel.invert_yaxis()
    panel.set(xlabel="ms", title=f"One step of {row['what']} on rank 0 of {row['ranks']}")
    bars = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in (WAITING, MOVING)]
    panel.legend(bars, ["waits for its bucket or the others", "moves"], fontsize=7, loc="lower left")
    return figure
