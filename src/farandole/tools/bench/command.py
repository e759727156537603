"""`python -m farandole.tools.bench`: measures everything, or the named parts, and compares it with other libraries.
Starts processes through processes.py; writes what --json and --plots name, and a temporary folder."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from farandole.tools.progress import Progress

from . import compare, hosts, life, machine, measure, plan, report, steps, targets, trace
from .inside.library import OPERATIONS
from .plan import PARTS, Plan, Row
from .processes import Failed
from .rank_pools import RankPools

FORMAT = 1  # of the JSON file


def say(line: str) -> None:
    """Progress, for people."""
    print(f"bench: {line}", file=sys.stderr, flush=True)


def rows_of(part: str, what: Plan, pools_by_size: RankPools, folder: Path, peer_python: str) -> Iterator[Row]:
    """The rows of a part as they are measured."""
    if part == "start":
        return life.start(what, pools_by_size, peer_python)
    if part == "hosts":
        return hosts.measure(what, pools_by_size, folder)
    functions = {
        "collectives": measure.collectives,
        "crowd": measure.crowd,
        "halves": measure.halves,
        "training": steps.training,
        "memory": steps.memory,
        "life": life.life,
        "idle": life.idle,
        "trace": trace.measure,
    }
    return functions[part](what, pools_by_size)


def run(parts: Sequence[str], what: Plan, peer_python: str) -> Iterator[Row]:
    """Measures."""
    at = 0

    def tell(line: str) -> None:
        progress.say(f"bench: {line}")

    with tempfile.TemporaryDirectory(prefix="farandole-bench-") as name:
        folder = Path(name)
        progress = Progress("bench", lambda: (at / len(parts), f"part {at + 1} of {len(parts)}, {parts[at]}"))
        with progress, RankPools(folder, peer_python, tell) as pools_by_size:
            for at, part in enumerate(parts):  # noqa: B007 (the bar reads it)
                began = time.monotonic()
                busy = machine.busy()
                tell(f"{part} (others use {busy:.1f} cores)" if busy > 0.2 else part)
                for row in rows_of(part, what, pools_by_size, folder, peer_python):
                    row["busy_cores"] = round(busy, 2)
                    tell("  " + " ".join(report.label(row)))
                    yield row
                tell(f"  {part} took {time.monotonic() - began:.0f} s")


def merge(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """A run in pieces: what was measured again replaces what was there."""
    found = {plan.key(row): row for row in old}
    found.update((plan.key(row), row) for row in new)
    return sorted(found.values(), key=lambda row: PARTS.index(row["part"]))


def read(path: Path, facts: dict[str, Any]) -> list[Row]:
    """The rows of an earlier run of this machine; none when it was another, or there was none."""
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    same = ("architecture", "processor", "cores")
    if found.get("format") != FORMAT or any(found["machine"][name] != facts[name] for name in same):
        raise Failed(f"{path} has results of another machine or version; name another file")
    rows: list[Row] = found["rows"]
    return rows


def baseline(path: Path, facts: dict[str, Any]) -> compare.Baseline | None:
    """The run to compare with: a file, or of a folder the file of this kind of machine; None where there is none."""
    file = path / f"{compare.kind_of(facts)}.json" if path.is_dir() else path
    if not file.exists() and path.is_dir():
        return None
    try:
        found = json.loads(file.read_text())
        if found["format"] == FORMAT:
            return compare.Baseline(file, compare.kind_of(found["machine"]), found["rows"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Failed(f"--compare {file}: expected a file that --json wrote, or a folder of them: {error}") from None
    raise Failed(f"--compare {file}: has format {found['format']}, expected {FORMAT}; measure it again")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="farandole bench",
        description="Measures allreduce and its like, training and a job's life on this machine, beside "
        "torch.distributed/Gloo, MPI and the machine's own limits, interleaved; results are checked, medians shown.",
    )
    names = f"of {', '.join(PARTS)}; all when none is named. Or one of the collectives: {', '.join(OPERATIONS)}"
    found.add_argument("parts", nargs="*", metavar="PART", help=names)
    found.add_argument("--quick", action="store_true", help="about a minute: does everything run? not for claims")
    found.add_argument("--lean", action="store_true", help="as many repeats of fewer sizes, calls and steps")
    found.add_argument("--ranks", default="", help="as in 2,16; default 2, 4, 8 ... up to the cores; 1 is for training")
    found.add_argument("--repeats", type=int, default=9, help="interleaved repeats, default 9")
    found.add_argument("--json", type=Path, help="write every number there; results of other parts in it stay")
    found.add_argument("--plots", type=Path, help="write PNG files into this folder (needs matplotlib)")
    found.add_argument("--from", dest="source", type=Path, help="measure nothing: tables and plots of this JSON file")
    found.add_argument(
        "--compare",
        type=Path,
        metavar="PATH",
        help="list what became slower since the run in this file, or in this folder's file of the same kind of machine",
    )
    found.add_argument("--strict", action="store_true", help="with --compare: exit code 1 when something became slower")
    found.add_argument("--peer-python", default="", help="an interpreter with another horovod.torch, to compare with")
    return found


def show(rows: Sequence[Row], facts: dict[str, Any], plots: Path | None) -> None:
    """Tables, targets, and plots when asked for."""
    print(f"{facts['processor']} ({facts['architecture']}), {facts['cores']} cores, Linux {facts['kernel']}, farandole")
    print(f"{facts['farandole']} ({facts['kernels']}), " + ", ".join(f"{k} {v}" for k, v in facts["versions"].items()))
    print("\n" + report.tables(rows))
    print(f"\n({report.LEGEND})")
    lines = [verdict.cells() for verdict in targets.verdicts(rows, facts["cores"], facts["architecture"])]
    print("\n" + report.text([["target", "measured", ""], *lines]), flush=True)
    if plots is not None:
        from . import plots as drawing

        for path in drawing.draw(rows, plots):
            say(f"drew {path.name}")


def comparison(rows: Sequence[Row], facts: dict[str, Any], path: Path, strict: bool) -> int:
    """Says what became slower; the exit code."""
    kind, before = compare.kind_of(facts), baseline(path, facts)
    if before is None:
        print("\n" + compare.missing(path, kind), flush=True)
        return 1 if strict else 0
    found = list(compare.changes(before.rows, rows))
    print("\n" + compare.verdict(found, before, kind), flush=True)
    good = bool(found) and not any(one.is_slower for one in found)
    return 1 if strict and not good else 0


def drawn(source: Path, options: argparse.Namespace) -> int:
    """Tables, plots and the comparison of a file, without measuring; the exit code."""
    found = json.loads(source.read_text())
    show(found["rows"], found["machine"], options.plots)
    return comparison(found["rows"], found["machine"], options.compare, options.strict) if options.compare else 0


def measured(parts: Sequence[str], what: Plan, facts: dict[str, Any], options: argparse.Namespace) -> int:
    """Measures, shows and compares; the exit code."""
    if options.compare:
        baseline(options.compare, facts)  # a wrong path must fail before an hour of measuring
    before = read(options.json, facts) if options.json else []
    rows: list[Row] = []
    for row in run(parts, what, options.peer_python):
        rows.append(row)
        if options.json:  # after every row: a run that is cut short keeps what it has
            write(options.json, facts, merge(before, rows), options.quick)
    show(merge(before, rows), facts, options.plots)
    return comparison(rows, facts, options.compare, options.strict) if options.compare else 0


def main(words: Sequence[str] | None = None) -> int:
    """Parses the command line and runs it; the exit code."""
    options = parser().parse_args(words)
    operations = tuple(word for word in options.parts if word in OPERATIONS)
    parts = [word for word in options.parts if word not in OPERATIONS]
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        say(f"unknown part {unknown[0]!r}; there are {', '.join((*PARTS, *OPERATIONS))}")
        return 2
    if options.strict and not options.compare:
        say("--strict: there is nothing to be strict about without --compare")
        return 2
    if operations and "collectives" not in parts:
        parts.append("collectives")
    try:
        if options.source is not None:
            return drawn(options.source, options)
        ranks = sorted({int(word) for word in options.ranks.split(",") if word})
    except (OSError, ValueError, KeyError, Failed) as error:
        say(str(error))
        return 2
    if any(count < 1 for count in ranks):
        say("--ranks: at least 1, and 2 for a collective")
        return 2
    if options.repeats < 7 and not options.quick:
        say("fewer than 7 repeats give an impression, not a result to publish")
    facts = machine.facts()
    if options.quick:
        what = plan.quick(ranks, facts["cores"])
    else:
        what = (plan.lean if options.lean else plan.full)(ranks, facts["cores"], options.repeats)
    if operations:
        what = dataclasses.replace(what, operations=operations)
    try:
        return measured(parts or PARTS, what, facts, options)
    except Failed as failure:
        say(str(failure))
        return 1


def write(path: Path, facts: dict[str, Any], rows: list[Row], quick: bool) -> None:
    """The JSON file, a row per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    head = f'{{\n "format": {FORMAT},\n "quick": {json.dumps(quick)},\n "machine": {json.dumps(facts)},\n'
    path.write_text(f'{head} "rows": [\n{lines}\n ]\n}}\n')
