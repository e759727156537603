"""How long training stands still when a worker of a HorovodTrainer is killed: Ray Train's own restart of all workers,
from the last checkpoint, and survivors that go on. One run prints both: `python bench/ray_recovery.py`."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

WORKERS, STEPS, DEATH = 3, 40, 10


def told(scratch: Path, step: int, first: bool) -> None:
    """Writes down when a step was through; at step DEATH of the first attempt rank 1 dies."""
    import farandole as hvd

    if hvd.rank() == 0:
        with open(scratch / "steps", "a") as file:
            file.write(f"{time.time()} {step} {hvd.size()}\n")
    died = scratch / "died"
    if first and step == DEATH and hvd.rank() == 1 and not died.exists():
        died.write_text(str(time.time()))
        os._exit(1)
    time.sleep(0.02)  # a step's work


def restarting(config: dict[str, Any]) -> None:
    """Goes on from the checkpoint of its last report."""
    import numpy as np
    import ray.train
    from ray.train import Checkpoint

    import farandole as hvd

    hvd.init()
    given = ray.train.get_checkpoint()
    begin = 0
    if given is not None:
        with given.as_directory() as folder:
            begin = int(Path(folder, "step").read_text()) + 1
    for step in range(begin, STEPS):
        hvd.allreduce(np.ones(1000), name="step")
        told(Path(config["scratch"]), step, given is None)
        if step % 5 == 4:
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "step").write_text(str(step))
                ray.train.report({"step": step}, Checkpoint.from_directory(folder) if hvd.rank() == 0 else None)


def surviving(config: dict[str, Any]) -> None:
    """Goes on from the last commit in memory, with those who are left."""
    import numpy as np

    import farandole as hvd
    import farandole.elastic

    hvd.init()

    @farandole.elastic.run
    def train(state: Any) -> None:
        while state.step < STEPS:
            hvd.allreduce(np.ones(1000), name="step")
            told(Path(config["scratch"]), state.step, True)
            state.step += 1
            if state.step % 5 == 0:
                state.commit()

    train(farandole.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0))


def recovery(scratch: Path) -> float:
    """Seconds from the death to the end of the next step."""
    died = float((scratch / "died").read_text())
    times = [float(line.split()[0]) for line in (scratch / "steps").read_text().splitlines()]
    return min(at for at in times if at > died + 0.02) - died


def measured(kind: str) -> float:
    """Of one run."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig

    from farandole.ray import HorovodTrainer

    with tempfile.TemporaryDirectory() as place:
        HorovodTrainer(
            surviving if kind == "survivors go on" else restarting,
            train_loop_config={"scratch": place},
            scaling_config=ScalingConfig(num_workers=(1, WORKERS) if kind == "survivors go on" else WORKERS),
            run_config=RunConfig(storage_path=place, failure_config=FailureConfig(max_failures=3)),
        ).fit()
        return recovery(Path(place))


def main() -> None:
    """Prints both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    import ray

    ray.init(num_cpus=WORKERS + 1, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    found: dict[str, list[float]] = {"Ray Train's restart": [], "survivors go on": []}
    for _ in range(repeats):
        for kind, seconds in found.items():
            seconds.append(measured(kind))
    ray.shutdown()
    for kind, seconds in found.items():
        print(f"{kind:20} {statistics.median(seconds):6.2f} s ({min(seconds):.2f} to {max(seconds):.2f})")


if __name__ == "__main__":
    main()
