"""The same exchange in every framework: the gradients of 34 million parameters, 64 arrays, averaged over 2 ranks.
Each framework is a job of its own and they take turns, so that noise falls on all: `python bench/frameworks.py`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = "import sys; from farandole.launch.cli import horovodrun; sys.exit(horovodrun())"
# About those of a transformer: many small arrays, a few large ones.
SHAPES: list[tuple[int, ...]] = [(768,)] * 32 + [(768, 1024)] * 28 + [(2048, 1536)] * 3 + [(2368, 960)]
WARM, STEPS = 3, 8

Step = Callable[[], Any]  # exchanges everything once, and returns when the results are there


def torch_step() -> tuple[Any, Step]:
    """The binding that the others are measured against."""
    import torch

    import farandole.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    tensors = [torch.ones(shape) for shape in SHAPES]
    return hvd, lambda: hvd.grouped_allreduce(tensors, name="exchange")


def jax_jit_step() -> tuple[Any, Step]:
    """A compiled function that is given its arrays for good, as a training step is, and gives back the averages."""
    import jax

    import farandole.jax as hvd

    hvd.init()
    held = [jax.block_until_ready([jax.numpy.ones(shape) for shape in SHAPES])]
    exchange = jax.jit(lambda arrays: hvd.allreduce(arrays, name="exchange"), donate_argnums=0)

    def step() -> None:
        held[0] = jax.block_until_ready(exchange(held[0]))

    return hvd, step


def jax_step() -> tuple[Any, Step]:
    """Outside compiled functions."""
    import jax

    import farandole.jax as hvd

    hvd.init()
    arrays = jax.block_until_ready([jax.numpy.ones(shape) for shape in SHAPES])
    return hvd, lambda: jax.block_until_ready(hvd.allreduce(arrays, name="exchange"))


# By the name of a row: the module that has to be there, what makes the step, variables of its processes.
ROWS: dict[str, tuple[str, Callable[[], tuple[Any, Step]], dict[str, str]]] = {
    "torch": ("torch", torch_step, {}),
    "jax, jit": ("jax", jax_jit_step, {"FARANDOLE_JAX_OPS": "compiled", "JAX_PLATFORMS": "cpu"}),
    "jax, jit, callback": ("jax", jax_jit_step, {"FARANDOLE_JAX_OPS": "callback", "JAX_PLATFORMS": "cpu"}),
    "jax, at once": ("jax", jax_step, {"JAX_PLATFORMS": "cpu"}),
}


def rank(name: str, place: Path, turns: int) -> None:
    """One rank of a row: some steps whenever its turn has come; rank 0 writes down what a step took."""
    hvd, step = ROWS[name][1]()
    for _ in range(WARM):
        step()
    (place / f"{name}.{hvd.rank()}.ready").touch()
    for turn in range(turns):
        while not (place / f"{name}.{turn}").exists():
            time.sleep(0.01)
        hvd.barrier()
        step()
        taken = []
        for _ in range(STEPS):
            hvd.barrier()
            began = time.perf_counter()
            step()
            taken.append(time.perf_counter() - began)
        if hvd.rank() == 0:
            (place / "new").write_text(json.dumps(taken))
            (place / "new").rename(place / f"{name}.{turn}.done")
    hvd.shutdown()


def wait(path: Path, job: subprocess.Popen[Any]) -> None:
    """Until the file is there; SystemExit when the job has ended before."""
    while not path.exists():
        if job.poll() is not None:
            sys.exit(f"{path.name}: the job ended with {job.returncode}")
        time.sleep(0.02)


def measure(names: list[str], turns: int) -> dict[str, list[float]]:
    """Seconds of each step, by row."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        jobs = {}
        for name in names:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", **ROWS[name][2]}
            environment["PYTHONPATH"] = f"{ROOT / 'src'}:{environment.get('PYTHONPATH', '')}"
            own = [sys.executable, __file__, "--rank", name, "--place", folder, "--turns", str(turns)]
            jobs[name] = subprocess.Popen([sys.executable, "-c", LAUNCH, "-np", "2", *own], env=environment)
        try:
            for name, job in jobs.items():
                for number in range(2):
                    wait(place / f"{name}.{number}.ready", job)
            found: dict[str, list[float]] = {name: [] for name in names}
            for turn in range(turns):
                for name, job in jobs.items():
                    (place / f"{name}.{turn}").touch()
                    wait(place / f"{name}.{turn}.done", job)
                    found[name] += json.loads((place / f"{name}.{turn}.done").read_text())
        finally:
            for job in jobs.values():
                try:
                    job.wait(20)
                except subprocess.TimeoutExpired:
                    job.terminate()
                    job.wait()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.rank, options.place, options.turns)
        return
    names = [name for name in options.rows if importlib.util.find_spec(ROWS[name][0]) is not None]
    found = measure(names, options.turns)
    count = sum(math.prod(shape) for shape in SHAPES)
    print(f"{count / 1e6:.1f} million parameters in {len(SHAPES)} arrays of float32, 2 ranks, {options.turns} turns")
    first = statistics.median(found[names[0]])
    for name, taken in found.items():
        middle = statistics.median(taken)
        least = min(taken) * 1e3
        print(f"{name:22} {middle * 1e3:8.1f} ms a step, least {least:8.1f}, {middle / first:5.2f} x {names[0]}")


if __name__ == "__main__":
    main()
