"""`make demo`: trains examples/digits.py with 1 process on 1 core and with 2 on 2, and compares them.
Starts the two jobs as a user would; writes only into a temporary folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from stages import ROOT

PYTHON = Path(sys.executable)
SCRIPT = ROOT / "examples" / "digits.py"


def train(ranks: int, folder: Path) -> dict[str, float]:
    """One job; its numbers as rank 0 wrote them."""
    result = folder / f"{ranks}.json"
    job: list[str | Path] = [PYTHON, SCRIPT, "--pin", "--result", result]
    if ranks > 1:
        job = [PYTHON.with_name("farandole"), "run", "-np", str(ranks), *job]
    # A rank has one core: more threads of arithmetic would only get in each other's way.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    print(f"demo: {ranks} process{'es' if ranks > 1 else ''} on {ranks} core{'s' if ranks > 1 else ''}", flush=True)
    code = subprocess.run([str(part) for part in job], env=environment, cwd=ROOT).returncode
    if code != 0:
        sys.exit(f"demo: the job with {ranks} processes failed ({code})")
    numbers: dict[str, float] = json.loads(result.read_text())
    return numbers


def main() -> int:
    """Both jobs and the table; 1 when a model did not learn."""
    print("demo: a network of 1.1 million parameters reads handwritten digits (about 20 s)", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        one, two = train(1, Path(folder)), train(2, Path(folder))
    efficiency = two["samples_per_s"] / (2 * one["samples_per_s"])
    print("\n  processes  accuracy  samples/s  ms per step  scaling efficiency")
    for numbers, share in ((one, 1.0), (two, efficiency)):
        print(
            f"  {numbers['ranks']:9.0f}  {numbers['accuracy']:8.1%}  {numbers['samples_per_s']:9.0f}"
            f"  {numbers['step_ms']:11.1f}  {share:18.0%}"
        )
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        print(f"  (this machine gives {cores} core, which both processes shared)")
    print("\ndemo: next: farandole run -np 2 python examples/digits.py, or your own script", flush=True)
    return 0 if min(one["accuracy"], two["accuracy"]) > 0.9 else 1


if __name__ == "__main__":
    sys.exit(main())
