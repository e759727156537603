"""Writes docs/claims.md: numbers that people quote of distributed training, and ours: `python scripts/claims.py`.
Reads bench/*.json and the two examples whose difference is counted."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "claims.md"
sys.path.insert(0, str(ROOT / "src"))
sys.path.insert(0, str(ROOT / "scripts"))

import performance  # noqa: E402
from farandole.tools.bench.report import median  # noqa: E402

EXAMPLES = ("examples/torch_single.py", "examples/torch_digits.py")
HEAD = """# Claims

Numbers that people quote of distributed training, beside ours. Each number of ours was made by the command beside it,
on the machine that is named; run the command to get yours. Where no command of this repository has made a number, the
page says so. `python scripts/claims.py` writes this page.

| the claim | ours | made by |
|---|---|---|
"""
NOT_MEASURED = "not measured"


def changed_lines() -> int:
    """How many lines of the example with one process are changed or added for several."""
    before, after = ((ROOT / name).read_text().splitlines() for name in EXAMPLES)
    return sum(line.startswith("+ ") and line[2:].strip() != "" for line in difflib.ndiff(before, after))


def machine(result: dict[str, Any]) -> str:
    """The machine of a result, in a few words."""
    facts = result["machine"]
    return f"{facts['processor']}, {facts['cores']} cores, version {facts['farandole']}"


def training(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of training with all libraries, on the most ranks that the machine has."""
    rows = [row for row in result["rows"] if row["part"] == "training" and "DDP on Gloo" in row["values"]]
    most = max(row["ranks"] for row in rows)
    return (row for row in rows if row["ranks"] == most)


def times_of(row: dict[str, Any], other: str) -> float:
    """The time of a step of `other`, in times of ours."""
    theirs, ours = median(row, other), median(row, "farandole")
    assert theirs and ours
    return theirs / ours


def beside_ddp(result: dict[str, Any]) -> str:
    """Steps of ours in the time of one step of DDP, for each model."""
    rows = list(training(result))
    times = [f"{row['what']} {times_of(row, 'DDP on Gloo'):.2f} x" for row in rows]
    return f"{', '.join(times)} with {rows[0]['ranks']} ranks ({machine(result)})"


def efficiency(result: dict[str, Any]) -> str:
    """The speed beside processes that do not communicate."""
    rows = list(training(result))
    shares = [f"{row['what']} {times_of(row, 'single'):.0%}" for row in rows]
    return f"{', '.join(shares)} with {rows[0]['ranks']} ranks ({machine(result)})"


def page() -> str:
    """The whole page."""
    runs = performance.load()
    results = list(runs.values())
    by = "`make bench`, in " + ", ".join(f"`bench/{name}.json`" for name in runs)
    rows = [
        (
            "5 to 10 lines make a script distributed (Horovod)",
            f"{changed_lines()} lines are changed or added in a PyTorch script",
            "`diff " + " ".join(EXAMPLES) + "`",
        ),
        ("10 to 20 % faster than DDP (many)", "on CPUs, steps in the time of one of DDP on Gloo:<br>"
         + "<br>".join(map(beside_ddp, results)), by),
        ("scaling efficiency of 90 % and more (Horovod: ResNet-101 and Inception V3 90 %, VGG-16 68 %, on 512 GPUs)",
         "small models on CPUs of one host, in percent of processes that do not communicate:<br>"
         + "<br>".join(map(efficiency, results)), by),
        ("ResNet-101, Inception V3 and VGG-16 themselves", NOT_MEASURED, "no machine with many GPUs was there"),
        ("Ray costs 2.5 % (Ray Train)", f"{NOT_MEASURED} on this version", "`python bench/ray_overhead.py`"),
        ("GPU tensors of one host faster than through the host", "[gpu.md](gpu.md#measured), on one H200",
         "`make gpu`, in `bench/results/h200.json`"),
        ("training goes on seconds after a kill", "[launcher.md](launcher.md#elastic-jobs)",
         "`farandole demo --kill`, `make chaos`"),
    ]  # fmt: skip
    return HEAD + "".join(f"| {claim} | {ours} | {command} |\n" for claim, ours, command in rows)


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(ROOT)}")
