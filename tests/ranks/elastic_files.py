# The files through which the ranks of the elastic fault tests and the test exchange messages.
# Touches farandole's NumPy layer and the scratch directory. The test's side is elastic_runs.py.
"""Rank 0 writes its progress into a file, each rank its result in another; a file named `finish` ends the training."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

import farandole
from farandole.world.runtime import runtime

SCRATCH = Path(os.environ["SCRATCH"])
PIDS: list[int] = []


def check_waiting() -> None:
    """What a rank has done so far has not made the others wait for it, if they were training when it started."""
    assert runtime.waiting == ("FARANDOLE_NEWCOMER" in os.environ)


def begin() -> None:
    """In a new world: who is there."""
    PIDS[:] = farandole.allgather_object(os.getpid(), name="pids")


def tell(step: int, **more: Any) -> None:
    """Where rank 0 is."""
    if farandole.rank() == 0:
        progress = {"step": step, "size": farandole.size(), "pids": PIDS, "time": time.monotonic(), **more}
        progress["generation"] = runtime.world.session.generation
        (SCRATCH / "progress.new").write_text(json.dumps(progress))
        os.rename(SCRATCH / "progress.new", SCRATCH / "progress")


def finishing() -> bool:
    """Whether this rank has been asked to end."""
    return (SCRATCH / "finish").exists()


def agreed(wish: bool) -> bool:
    """Whether any rank wishes to end; all ranks get the same answer."""
    return bool(farandole.allreduce(np.array([int(wish)]), op=farandole.Max, name="finish")[0])


def leave(**result: Any) -> None:
    """Writes what this rank ends with, and leaves the job."""
    (SCRATCH / f"result.{farandole.rank()}").write_text(json.dumps(result))
    farandole.shutdown()
