"""`make demo`: trains examples/torch_digits.py with 1 process on 1 core and with 2 on 2, and DDP over Gloo beside them.
Starts the three jobs as a user would; `demo.py pinned SCRIPT` is how each of their ranks gets a core of its own."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from stages import ROOT

PYTHON = Path(sys.executable)
FARANDOLE = [PYTHON.with_name("farandole"), "run", "--raw", "-np"]
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node"]


@dataclass(frozen=True)
class Job:
    """One row of the table."""

    title: str
    ranks: int
    script: str
    launcher: list[str | Path]


JOBS = [
    Job("one process", 1, "torch_single.py", []),
    Job("Farandole", 2, "torch_digits.py", [*FARANDOLE, "2"]),
    Job("DDP over Gloo", 2, "torch_ddp.py", [*TORCHRUN, "2"]),
]


@dataclass(frozen=True)
class Result:
    """What the first rank of a job printed: of each step, its time and the images of one rank."""

    accuracy: float
    step_ms: float
    images: float

    @property
    def rate(self) -> float:
        """Images per second and rank."""
        return 1e3 * self.images / self.step_ms


def train(job: Job) -> Result:
    """Runs a job."""
    print(f"demo: {job.title}: examples/{job.script} on {job.ranks} core{'s' if job.ranks > 1 else ''}", flush=True)
    command = [*job.launcher, PYTHON, Path(__file__), "pinned", ROOT / "examples" / job.script]
    # A rank has one core: more threads of arithmetic would only get in each other's way.
    run = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    found = re.search(r"accuracy ([\d.]+)%, ([\d.]+) ms per step of (\d+) images", run.stdout)
    if run.returncode != 0 or found is None:
        sys.exit(f"{run.stdout}\ndemo: {job.title}: the job failed ({run.returncode})")
    return Result(*(float(number) for number in found.groups()))


def pinned(script: str) -> None:
    """Runs a script on the core that belongs to this rank, whoever started it."""
    rank = int(os.environ.get("FARANDOLE_LOCAL_RANK") or os.environ.get("LOCAL_RANK") or 0)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")


def main() -> int:
    """The jobs and the table; 1 when a model did not learn."""
    print("demo: a network of 0.5 million parameters learns to read handwritten digits (about 25 s)", flush=True)
    results = [train(job) for job in JOBS]
    print("\n                 processes  accuracy  samples/s  ms per step  scaling efficiency")
    for job, result in zip(JOBS, results, strict=True):
        print(
            f"  {job.title:13}  {job.ranks:9}  {result.accuracy:7.1f}%  {job.ranks * result.rate:9.0f}"
            f"  {result.step_ms:11.1f}  {result.rate / results[0].rate:18.0%}"
        )
    if (cores := len(os.sched_getaffinity(0))) < 2:
        print(f"  (this machine gives {cores} core, which both processes shared)")
    print("\ndemo: next: farandole run -np 2 python examples/torch_digits.py, or your own script", flush=True)
    return 0 if min(result.accuracy for result in results) > 90 else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["pinned"]:
        pinned(sys.argv[2])
    else:
        sys.exit(main())
