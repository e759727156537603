"""`python -m farandole.tools.bench allreduce | idle`: starts the ranks of a measurement and prints what they found.
Starts processes through launch/ alone; writes a file only when asked with --json."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...launch import local
from ...version import package_version
from . import mpi, report

SIZES = "1KiB,64KiB,1MiB,16MiB,64MiB"


class Failed(Exception):
    """A measurement that did not come to its end."""


def job(what: str, ranks: int, folder: Path, *arguments: str) -> dict[str, Any]:
    """Runs worker.py in `ranks` processes of this machine; what rank 0 wrote."""
    command = [sys.executable, "-m", "farandole.tools.bench.worker", what, "--folder", str(folder), *arguments]
    # Gloo looks up the host's name otherwise, which fails on machines that do not know their own.
    extra = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    run(command, ranks, extra)
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def run(command: list[str], ranks: int, extra: dict[str, str]) -> None:
    """Starts and waits; Failed when a rank fails."""
    with local.start(command, np=ranks, env=extra, output="raw") as job:
        code = job.wait()
        if job.failure is not None:
            raise Failed(f"rank {job.failure[0]} failed ({local.describe(code)}): {' '.join(command)}")


def machine() -> dict[str, Any]:
    """Where it was measured; a busy machine explains a bad number."""
    return {
        "machine": platform.machine(),
        "system": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "farandole": package_version(),
    }


def with_mpi(found: dict[str, Any], ranks: int, sizes: list[int], repeats: int, folder: Path) -> str:
    """Adds MPI's timings to ours when it is there; a line that says what happened."""
    start = mpi.command(ranks, sizes, repeats, folder / "mpi.json")
    if isinstance(start, str):
        return start
    run(start, 1, {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})
    for ours, theirs in zip(found["results"], json.loads((folder / "mpi.json").read_text()), strict=True):
        for kind in ("reused", "fresh"):
            ours[kind]["mpi"] = theirs[kind]
    return f"{start[0]}: measured right after, in a job of its own"


def allreduce(options: argparse.Namespace) -> dict[str, Any]:
    """The table against Gloo, MPI and memcpy."""
    sizes = [report.parse_size(text) for text in options.sizes.split(",")]
    where = machine()
    print(
        f"allreduce of float32 sums, {options.ranks} ranks on one host ({where['machine']}, {where['cores']} cores, "
        f"load {where['load']:.1f}), medians of {options.repeats} repeats, slowest rank, results checked with NumPy",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        arguments = ["--sizes", json.dumps(sizes), "--repeats", str(options.repeats)]
        found = job("allreduce", options.ranks, place, *arguments)
        line = with_mpi(found, options.ranks, sizes, options.repeats, place)
    print("\nreused: in place, in memory that was used before")
    print(report.table(found["results"], "reused"))
    print("\nfresh: from an input into new memory (Gloo: clone, then in place)")
    print(report.table(found["results"], "fresh"))
    print(f"\n{line}")
    if importlib.util.find_spec("torch") is None:
        print("torch: not found (pip install torch==2.13.0 to compare with Gloo)")
    return {"what": "allreduce", "where": where, **found}


def idle(options: argparse.Namespace) -> dict[str, Any]:
    """What a job costs that does nothing."""
    print(f"idle: {options.ranks} ranks on one host do nothing for {options.seconds:g} s", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        found = job("idle", options.ranks, Path(folder), "--seconds", str(options.seconds))
    print("  rank    CPU %  context switches/s")
    for rank, (cpu, switches) in enumerate(zip(found["cpu_percent"], found["switches_per_s"], strict=True)):
        print(f"  {rank:4d}  {cpu:7.3f}  {switches:18.1f}")
    print(f"  mean  {statistics.mean(found['cpu_percent']):7.3f}  {statistics.mean(found['switches_per_s']):18.1f}")
    return {"what": "idle", "where": machine(), **found}


def main(words: Sequence[str] | None = None) -> int:
    """Parses the command line and runs it; the exit code."""
    parser = argparse.ArgumentParser(
        prog="farandole bench", description="Measures collectives between ranks on this machine."
    )
    commands = parser.add_subparsers(dest="what", required=True)
    for name, text in (("allreduce", "beside Gloo, MPI and memcpy"), ("idle", "what a job costs that does nothing")):
        command = commands.add_parser(name, help=text)
        command.add_argument("--ranks", type=int, default=2)
        command.add_argument("--json", type=Path, help="write every raw number to this file")
    commands.choices["allreduce"].add_argument("--sizes", default=SIZES, help=f"bytes, default {SIZES}")
    commands.choices["allreduce"].add_argument("--repeats", type=int, default=9)
    commands.choices["idle"].add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args(words)
    if options.what == "allreduce" and options.repeats < 7:
        print("bench: fewer than 7 repeats are good for a look, not for a claim", file=sys.stderr)
    try:
        result = allreduce(options) if options.what == "allreduce" else idle(options)
    except Failed as failure:
        print(f"bench: {failure}", file=sys.stderr)
        return 1
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0
