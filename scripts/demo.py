"""`make demo`: trains examples/torch_digits.py with 1 process on 1 core, with 2 on 2, and with DDP over Gloo.
Starts the three jobs at the same time, and lets one job train at a time. Their ranks run scripts/turns.py."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from farandole.tools.bench.machine import busy
from farandole.tools.bench.processes import PYTHON, Failed, Process
from farandole.tools.bench.rank_pools import AT_ONCE_SECONDS, START_SECONDS, RankPool
from stages import ROOT
from turns import STEPS_PER_TURN

FARANDOLE = [PYTHON, "-m", "farandole", "run", "--raw", "-np", "2"]
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node", "2"]
EPOCHS = 7
END_SECONDS = 100.0  # a job must end within this time after training; usually it needs one second
ROUNDS_PER_EPOCH = 3  # two processes share 30 batches


@dataclass(frozen=True)
class Job:
    """One row of the table."""

    title: str
    ranks: int
    script: str
    launcher: Sequence[str]


ALONE = Job("one process", 1, "torch_single.py", [])
TOGETHER = [Job("Farandole", 2, "torch_digits.py", FARANDOLE), Job("DDP over Gloo", 2, "torch_ddp.py", TORCHRUN)]


@dataclass(frozen=True)
class Round:
    """Milliseconds per step of the single process, and of the job whose turn came directly after it."""

    alone: float
    job: float

    @property
    def efficiency(self) -> float:
        """The speed of each rank as a part of the speed of a single process."""
        return self.alone / self.job


@dataclass(frozen=True)
class Result:
    """The results of a job: its accuracy, the images per step and rank, its rounds."""

    job: Job
    accuracy: float
    images: int
    rounds: Sequence[Round]

    @property
    def step_ms(self) -> float:
        """The median over the rounds."""
        return statistics.median(one.job for one in self.rounds)

    @property
    def efficiency(self) -> float:
        """The median over the rounds. Each round compares turns that are close in time."""
        return statistics.median(one.efficiency for one in self.rounds)

    def line(self) -> str:
        """A row of the table."""
        rate = self.job.ranks * self.images / self.step_ms * 1e3
        return (
            f"  {self.job.title:13}  {self.job.ranks:9}  {self.accuracy:7.1f}%  {rate:9.0f}"
            f"  {self.step_ms:11.1f}  {self.efficiency:18.0%}"
        )


def table(results: Sequence[Result], others: float, cores: int) -> str:
    """The text of the table: medians, the range of the rounds, and how busy the machine was."""
    lines = ["                 processes  accuracy  samples/s  ms per step  scaling efficiency"]
    lines += [result.line() for result in results]
    ranges = []
    for result in results[1:]:
        found = sorted(one.efficiency for one in result.rounds)
        ranges.append(f"{result.job.title} {found[0]:.0%} to {found[-1]:.0%}")
    lines.append(f"  (medians of {len(results[0].rounds)} rounds; efficiency in single rounds: {', '.join(ranges)})")
    if others > 0.2:
        lines.append(f"  (others used {others:.1f} cores meanwhile: all of this is better on a quiet machine)")
    if cores < 2:
        lines.append(f"  (this machine gives {cores} core, which both processes shared)")
    return "\n".join(lines)


class Running:
    """A job whose ranks train only during their turns."""

    def __init__(self, job: Job, folder: Path, epochs: int) -> None:
        self.job = job
        self._process: Process | None = None

        def start(folder: Path) -> list[Process]:
            rank = [PYTHON, str(ROOT / "scripts" / "turns.py"), str(folder), str(ROOT / "examples" / job.script)]
            variables = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "TMPDIR": str(folder)}
            self._process = Process([*job.launcher, *rank, "--epochs", str(epochs)], folder / "output", variables)
            return [self._process]

        with self._with_output():
            self._pool = RankPool(job.title, job.ranks, folder, start)

    def turn(self) -> tuple[float, int]:
        """Trains some steps. Returns milliseconds per step of the slowest rank, and the images of a rank per step."""
        with self._with_output():
            answers = self._pool.ask("turn", START_SECONDS)  # torch is imported before the first turn
        return 1e3 * max(answer["seconds"] for answer in answers), answers[0]["images"]

    def finish(self) -> float:
        """Lets the script end. Returns the accuracy that it printed."""
        self._pool.close(END_SECONDS)
        assert self._process is not None
        found = re.search(r"accuracy ([\d.]+)%", self._process.printed())
        if self._process.code() != 0 or found is None:
            raise Failed(f"{self._process.printed()}\n{self.job.title}: the job failed ({self._process.code()})")
        return float(found[1])

    def stop(self) -> None:
        """Ends the job at any point; does nothing if it has ended."""
        self._pool.close(AT_ONCE_SECONDS)

    @contextlib.contextmanager
    def _with_output(self) -> Iterator[None]:
        """Adds the output of a failed job to the error."""
        try:
            yield
        except Failed as failure:
            output = self._process.printed() if self._process else ""
            why = str(failure).removesuffix(output[-500:]).rstrip(" :")
            raise Failed(f"{output}\n{why}") from None


def take_turns(jobs: Sequence[Running], rounds: int) -> tuple[list[list[Round]], int]:
    """In each round the single process has a turn before each other job. Returns the rounds of every job, with those of
    the single process, and the images of a step."""
    alone, *together = jobs
    found: list[list[Round]] = [[] for _ in jobs]
    images = 0
    for _ in range(rounds):
        before = []
        for number, job in enumerate(together, 1):
            single, images = alone.turn()
            found[number].append(Round(single, job.turn()[0]))
            before.append(single)
        mean = statistics.fmean(before)
        found[0].append(Round(mean, mean))
    return found, images


def train(epochs: int) -> tuple[list[Result], float]:
    """Runs the jobs in turns; the first epoch is not measured. Also returns how many cores other programs used."""
    with tempfile.TemporaryDirectory(prefix="farandole-demo-") as folder, contextlib.ExitStack() as stack:
        jobs = []
        for number, job in enumerate([ALONE, *TOGETHER]):
            cores = f"{job.ranks} core{'s' if job.ranks > 1 else ''}"
            print(f"demo: {job.title}: examples/{job.script} on {cores}", flush=True)
            jobs.append(Running(job, Path(folder, str(number)), epochs))
            stack.callback(jobs[-1].stop)
        take_turns(jobs, ROUNDS_PER_EPOCH)
        rounds = ROUNDS_PER_EPOCH * (epochs - 1)
        print(f"demo: they train in turns, {STEPS_PER_TURN} steps at a time, {rounds} rounds", flush=True)
        others = busy()  # no job has a turn now
        found, images = take_turns(jobs, rounds)
        others = max(others, busy())
        done = zip(jobs, found, strict=True)
        return [Result(job.job, job.finish(), images, list_of_rounds) for job, list_of_rounds in done], others


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the jobs and prints the table. Returns 1 if a model did not learn."""
    parser = argparse.ArgumentParser(prog="demo.py", description="Trains with 1 process, with 2, and with DDP.")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=f"at least 2, default {EPOCHS}")
    epochs = parser.parse_args(arguments).epochs
    if epochs < 2:
        parser.error(f"--epochs {epochs}: expected at least 2, because the first one warms up")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the jobs are ended
    print("demo: a network of 0.5 million parameters learns to read handwritten digits (about 30 s)", flush=True)
    try:
        results, others = train(epochs)
    except Failed as failure:
        print(f"demo: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    print("\n" + table(results, others, len(os.sched_getaffinity(0))))
    print("\ndemo: next: farandole run -np 2 python examples/torch_digits.py, or your own script", flush=True)
    if min(result.accuracy for result in results) > 90:
        return 0
    print("demo: a model has not learned: its accuracy is not above 90 %", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
