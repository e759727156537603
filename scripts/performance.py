"""Writes docs/performance.md and its pictures from the benchmark files in bench/: `python scripts/performance.py`.
Reads bench/*.json. Only the pictures need matplotlib."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from farandole.tools.bench import plots, report, targets  # noqa: E402
from farandole.tools.bench.plan import PARTS, Row  # noqa: E402

RESULTS = ROOT / "bench"
PAGE = ROOT / "docs" / "performance.md"
PICTURES = ROOT / "docs" / "performance"
CAPTIONS = {
    "bandwidth": "Allreduce: gigabytes of tensor per second against size",
    "latency": "Allreduce: microseconds against size",
    "efficiency": "Training: efficiency against ranks",
    "step": "One training step, from rank 0's timeline",
}

HEAD = """# Performance

`python scripts/performance.py` writes this page from the files in `bench/`. Each file is a run of `make bench` on one
machine. All numbers are medians of interleaved repeats: each repeat measures every library once, so that a busy moment
disturbs all of them. Data is random, and every result is checked. A call ends when its slowest rank has the result.
Compare libraries by the ratio within one run; absolute numbers differ between machines.

## Where the time goes

Inside a host tensors do not go through the kernel. Each rank does three things: it copies the slices that others reduce
into shared memory; it reduces its own slice from its tensor and the copies of the others, and writes the sum to its
result and to shared memory in one pass; it copies the results of the other slices from shared memory. See
[algorithms.md](algorithms.md) for the bytes of every collective. These copies are the cost of large tensors. For this
reason the tables show two limits: `memcpy` by one core, and a copy by all ranks at once. Small tensors cost the call
from Python into the core and one exchange of flags; a waiting rank spins before it sleeps. In training, gradients are
sent while backward still runs, and repeated steps follow a plan without negotiation. The remaining cost of
communication is the difference to `single`: as many pinned processes as ranks, which do not communicate. All of these
keep the memory that a step frees for the next step, by the variables that Farandole's [launcher](launcher.md) sets for
its ranks. [timeline.md](timeline.md) explains how to see the same for your own job, and [tuning.md](tuning.md) which
setting to change when.

The targets for two ranks were set for the Neoverse with 2 cores, the targets for many ranks for the machine with 16
cores. The other machine with 2 cores shows the effect of slow memory: see `memcpy` in its tables.

The tables show these limits. The number in brackets after a target is what the limit itself would reach:

- `memcpy` and `copy by all` move each byte once, as does a large alltoall inside a host. An allreduce moves it three
  times, an allgather twice, because results are in private memory of the receiver. Gloo's time for one size changes
  from run to run, by a factor of two at 1 MiB, and the ratios change with it.
- `single, in step` is the same training without communication, but each step waits for the slowest rank: no
  synchronous training can be faster. `in step, one copy` also copies each gradient once after backward: the cost in
  memory traffic of moving gradients at all.
- `plain TCP, all at once`: several hosts send to one port at the same time, as `direct` does; `plain TCP, both ways`
  has one sender for each port, as `ring` does.

## Measure it yourself

```
make bench                     # everything, 15 to 20 minutes on 2 cores, with plots in build/bench
make bench BENCH=--quick       # a minute: does everything run?
python -m farandole.tools.bench collectives training --ranks 2,8 --json here.json      # from the wheel, parts of it
python -m farandole.tools.bench --lean --json here.json                                # a third of the time
python -m farandole.tools.bench --from here.json --plots pictures                      # draw later, or elsewhere
```

The parts are {parts}. With `--json FILE` several runs of single parts fill one file. torch.distributed/Gloo is
always measured too; MPI if `mpirun` and `mpi4py` are installed; the original Horovod if `--peer-python` names an
interpreter that has it. `hosts` creates network namespaces and needs root, `ip` and `tc`. Use a machine without other
load: a line says how many cores other programs use. For this page run `python -m farandole.tools.bench --json
bench/NAME.json`, then `python scripts/performance.py`.

At the end `make bench` lists what became slower since the file of the same kind of machine in `bench/` (`--compare
bench`). It compares ratios to the library with the least noise in the same run, in training the efficiency, and never
times. A difference counts if it is above 10 % and above three times the noise of both runs; with `--strict` it is an
error.
"""


def load() -> dict[str, dict[str, Any]]:
    """The committed runs by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def shown(rows: Sequence[Row]) -> list[Row]:
    """The rows for the page: all sizes of allreduce; the largest size of other operations and of new tensors."""
    largest: dict[tuple[str, int], int] = {}
    for row in rows:
        if row["part"] == "collectives":
            at = row["what"], row["ranks"]
            largest[at] = max(largest.get(at, 0), row["bytes"])

    def fits(row: Row) -> bool:
        if row["part"] != "collectives" or row["bytes"] == largest[row["what"], row["ranks"]]:
            return True
        return bool(row["what"] == "allreduce" and row["kind"] == "reused")

    return [row for row in rows if fits(row)]


def machine(name: str, run: dict[str, Any]) -> Iterator[str]:
    """The section about one machine."""
    facts, rows = run["machine"], run["rows"]
    versions = ", ".join(f"{key} {value}" for key, value in facts["versions"].items())
    yield f"## {facts['processor']}, {facts['cores']} cores ({facts['architecture']})"
    yield (
        f"{facts['memory_gib']} GiB of memory, Linux {facts['kernel']}, Python {facts['python']}, {versions}; "
        f"Farandole {facts['farandole']} with its {facts['kernels']} kernels. "
        f"All numbers: [{name}.json](../bench/{name}.json)."
    )
    found = targets.verdicts(rows, facts["cores"], facts["architecture"])
    measured = [verdict.cells() for verdict in found if verdict.met is not None]
    yield report.markdown([["target", "measured", ""], *measured])
    for key, caption in CAPTIONS.items():
        if key in pictures_of(rows):
            yield f"![{caption}](performance/{name}-{key}.png)"
    yield f"### The tables\n\n{report.LEGEND}"
    yield report.tables(shown(rows), report.markdown)


def pictures_of(rows: Sequence[Row]) -> list[str]:
    """The pictures that can be drawn from the rows."""
    found = {"collectives": ["bandwidth", "latency"], "training": ["efficiency"], "trace": ["step"]}
    return [name for part, names in found.items() if any(row["part"] == part for row in rows) for name in names]


def page() -> str:
    """The text of docs/performance.md."""
    runs = load()
    sections = [HEAD.format(parts=", ".join(f"`{part}`" for part in PARTS)).rstrip()]
    if not runs:
        sections.append("No machine's run is committed yet.")
    for name, run in runs.items():
        sections += machine(name, run)
    return "\n\n".join(sections) + "\n"


def main() -> int:
    """Writes the page, and the pictures if matplotlib is installed."""
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(ROOT)}")
    if importlib.util.find_spec("matplotlib") is None:
        print("no pictures: pip install matplotlib", file=sys.stderr)
        return 1
    for name, run in load().items():
        for path in plots.draw(run["rows"], PICTURES, f"{name}-"):
            print(f"drew {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
