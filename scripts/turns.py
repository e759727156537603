"""One rank of `make demo`: runs an unchanged example on its own core, and trains only during the turns of its job.
Touches torch's DataLoader, and the two named pipes that give turns."""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

# A small number, so that other programs on this machine disturb all jobs equally, or only a few of many rounds. The
# first step of a turn is not timed, because the caches have the data of another job, and threads sleep.
STEPS_PER_TURN = 5
STEPS_TIMED = STEPS_PER_TURN - 1


def in_turns(batches: Callable[[Any], Iterator[Any]], wait: Callable[[], None], answer: Callable[[Any], None]) -> Any:
    """An iteration of a loader that waits for a turn, gives some batches, reports the time of a step, and repeats."""
    steps, began = 0, 0.0

    def epoch(loader: Any) -> Iterator[Any]:
        nonlocal steps, began
        if steps == 0:
            wait()
        for batch in batches(loader):
            yield batch
            steps += 1
            if steps % STEPS_PER_TURN == 1:
                began = time.perf_counter()
            if steps % STEPS_PER_TURN == 0:
                answer({"seconds": (time.perf_counter() - began) / STEPS_TIMED, "images": loader.batch_size})
                wait()

    return epoch


def run(folder: Path, script: str, options: Sequence[str]) -> None:
    """Runs an unchanged example on the core of this rank, in turns with the other jobs."""
    rank = int(os.environ.get("FARANDOLE_LOCAL_RANK") or os.environ.get("LOCAL_RANK") or 0)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    with open(folder / f"commands.{rank}") as commands, open(folder / f"answers.{rank}", "w") as answers:

        def wait() -> None:
            if not commands.readline():  # the pipe has ended: the process that gives turns has ended
                sys.exit("demo: was ended")

        def answer(what: Any) -> None:
            print(json.dumps(what), file=answers, flush=True)

        answer("here")
        from torch.utils.data import DataLoader

        DataLoader.__iter__ = in_turns(DataLoader.__iter__, wait, answer)  # type: ignore[method-assign]
        sys.argv = [script, *options]
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
