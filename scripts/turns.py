"""One rank of `make demo`: runs an example as it is, on a core of its own, and only while its job has its turn.
Touches torch's DataLoader, and the two named pipes that tell whose turn it is."""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

# Few: what else runs on this machine then hits all jobs alike, or spoils a few rounds of many. The first step of a turn
# is not timed: it finds caches full of another job's data, and threads asleep.
STEPS_PER_TURN = 5
STEPS_TIMED = STEPS_PER_TURN - 1


def in_turns(batches: Callable[[Any], Iterator[Any]], wait: Callable[[], None], answer: Callable[[Any], None]) -> Any:
    """A loader's iteration that waits for its turn, trains some steps, answers how long one took, and waits again."""
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
    """Runs an example as it is, on the core that belongs to this rank, in turns with the other jobs."""
    rank = int(os.environ.get("FARANDOLE_LOCAL_RANK") or os.environ.get("LOCAL_RANK") or 0)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    with open(folder / f"orders.{rank}") as orders, open(folder / f"answers.{rank}", "w") as answers:

        def wait() -> None:
            if not orders.readline():  # the end of the pipe: whoever gave turns is gone
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
