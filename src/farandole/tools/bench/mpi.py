"""The same allreduce through MPI, when an mpirun and mpi4py are there: a job of its own, started by mpirun.
Uses mpi4py and NumPy; rank 0 writes a JSON file."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from .worker import data, rounds


def command(ranks: int, sizes: list[int], repeats: int, result: Path) -> list[str] | str:
    """How to start it here, or why not."""
    mpirun = shutil.which("mpirun") or shutil.which("mpiexec")
    if mpirun is None:
        return "mpirun: not found"
    if importlib.util.find_spec("mpi4py") is None:
        return f"{mpirun} is there, but mpi4py is not: pip install mpi4py"
    return [mpirun, "-n", str(ranks), sys.executable, "-m", __name__, json.dumps(sizes), str(repeats), str(result)]


def main() -> None:
    """One rank under mpirun."""
    from mpi4py import MPI

    parser = argparse.ArgumentParser()
    parser.add_argument("sizes", type=json.loads)
    parser.add_argument("repeats", type=int)
    parser.add_argument("result", type=Path)
    options = parser.parse_args()
    world = MPI.COMM_WORLD
    results: list[dict[str, Any]] = []
    for size in options.sizes:
        mine = data(max(1, size // 4), world.rank)
        out = np.empty_like(mine)
        count = rounds(mine.nbytes)
        times: dict[str, list[float]] = {"reused": [], "fresh": []}
        for repeat in range(options.repeats + 1):
            for kind in times:
                world.Barrier()
                began = time.perf_counter()
                for _ in range(count):
                    world.Allreduce(mine, out if kind == "reused" else np.empty_like(mine), op=MPI.SUM)
                spent = world.allreduce((time.perf_counter() - began) / count, op=MPI.MAX)
                if repeat > 0:  # the first one warms up
                    times[kind].append(spent)
        results.append({"bytes": mine.nbytes, **times})
    if world.rank == 0:
        options.result.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
