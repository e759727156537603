"""`make demo`: trains examples/torch_digits.py with 1 process on 1 core and with 2 on 2, and DDP over Gloo beside them.
Starts the three jobs at once, and lets one of them train at a time; scripts/turns.py is what runs in their ranks."""

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

from farandole.tools.bench.lanes import AT_ONCE_SECONDS, START_SECONDS, Lane
from farandole.tools.bench.machine import busy
from farandole.tools.bench.processes import PYTHON, Failed, Process
from stages import ROOT
from turns import STEPS_PER_TURN

FARANDOLE = [PYTHON, "-m", "farandole", "run", "--raw", "-np", "2"]
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node", "2"]
EPOCHS = 7
END_SECONDS = 100.0  # for a job that has trained: it ends within a second, on a busy machine within many
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
    """Milliseconds per step of one process, and of a job that had its turn directly after it."""

    alone: float
    job: float

    @property
    def efficiency(self) -> float:
        """How near each rank comes to a process that has nobody to wait for."""
        return self.alone / self.job


@dataclass(frozen=True)
class Result:
    """What the table says of a job: its accuracy, the images of a step and rank, its rounds."""

    job: Job
    accuracy: float
    images: int
    rounds: Sequence[Round]

    @property
    def step_ms(self) -> float:
        """The median of the rounds."""
        return statistics.median(one.job for one in self.rounds)

    @property
    def efficiency(self) -> float:
        """The median of the rounds' own: each compares neighbours in time."""
        return statistics.median(one.efficiency for one in self.rounds)

    def line(self) -> str:
        """A row of the table."""
        rate = self.job.ranks * self.images / self.step_ms * 1e3
        return (
            f"  {self.job.title:13}  {self.job.ranks:9}  {self.accuracy:7.1f}%  {rate:9.0f}"
            f"  {self.step_ms:11.1f}  {self.efficiency:18.0%}"
        )


def table(results: Sequence[Result], others: float, cores: int) -> str:
    """What is shown: medians, the range of the rounds, and what the machine has to do with it."""
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
    """A job whose ranks train when they are told to."""

    def __init__(self, job: Job, folder: Path, epochs: int) -> None:
        self.job = job
        self._process: Process | None = None

        def start(place: Path) -> list[Process]:
            rank = [PYTHON, str(ROOT / "scripts" / "turns.py"), str(place), str(ROOT / "examples" / job.script)]
            variables = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "TMPDIR": str(place)}
            self._process = Process([*job.launcher, *rank, "--epochs", str(epochs)], place / "said", variables)
            return [self._process]

        with self._whole_words():
            self._lane = Lane(job.title, job.ranks, folder, start)

    def turn(self) -> tuple[float, int]:
        """Trains some steps: milliseconds of one on the slowest rank, and the images of a rank in it."""
        with self._whole_words():
            answers = self._lane.ask("turn", START_SECONDS)  # before the first one torch is imported
        return 1e3 * max(answer["seconds"] for answer in answers), answers[0]["images"]

    def finish(self) -> float:
        """Lets the script come to its end; the accuracy that it printed."""
        self._lane.close(END_SECONDS)
        assert self._process is not None
        found = re.search(r"accuracy ([\d.]+)%", self._process.said())
        if self._process.code() != 0 or found is None:
            raise Failed(f"{self._process.said()}\n{self.job.title}: the job failed ({self._process.code()})")
        return float(found[1])

    def stop(self) -> None:
        """Ends it wherever it is; nothing when it has ended."""
        self._lane.close(AT_ONCE_SECONDS)

    @contextlib.contextmanager
    def _whole_words(self) -> Iterator[None]:
        """A job that failed has said more than a lane tells."""
        try:
            yield
        except Failed as failure:
            said = self._process.said() if self._process else ""
            why = str(failure).removesuffix(said[-500:]).rstrip(" :")
            raise Failed(f"{said}\n{why}") from None


def play(jobs: Sequence[Running], rounds: int) -> tuple[list[list[Round]], int]:
    """Each round: one process has its turn before each of the others has. The rounds of every job, one process's
    among them, and the images of a step."""
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
    """Runs the jobs in turns; the first epoch warms up. Also how many cores others used."""
    with tempfile.TemporaryDirectory(prefix="farandole-demo-") as folder, contextlib.ExitStack() as stack:
        jobs = []
        for number, job in enumerate([ALONE, *TOGETHER]):
            cores = f"{job.ranks} core{'s' if job.ranks > 1 else ''}"
            print(f"demo: {job.title}: examples/{job.script} on {cores}", flush=True)
            jobs.append(Running(job, Path(folder, str(number)), epochs))
            stack.callback(jobs[-1].stop)
        play(jobs, ROUNDS_PER_EPOCH)
        rounds = ROUNDS_PER_EPOCH * (epochs - 1)
        print(f"demo: they train in turns, {STEPS_PER_TURN} steps at a time, {rounds} rounds", flush=True)
        others = busy()  # nobody has a turn
        found, images = play(jobs, rounds)
        others = max(others, busy())
        done = zip(jobs, found, strict=True)
        return [Result(job.job, job.finish(), images, list_of_rounds) for job, list_of_rounds in done], others


def main(words: Sequence[str] | None = None) -> int:
    """The jobs and the table; 1 when a model did not learn."""
    parser = argparse.ArgumentParser(prog="demo.py", description="Trains with 1 process and with 2, and DDP beside.")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=f"at least 2, default {EPOCHS}")
    epochs = parser.parse_args(words).epochs
    if epochs < 2:
        parser.error(f"--epochs {epochs}: expected at least 2, because the first one warms up")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # the jobs are ended
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
