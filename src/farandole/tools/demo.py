# `farandole demo --kill`: an elastic job of three ranks, one of which is killed while it trains.
# Touches launch/; kills a process of its own job.
"""It shows that the others continue, the rank is replaced, no sample is lost, and all ranks end with equal weights."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import sys
import time
from typing import Any

from farandole.base.config import environment
from farandole.launch import options as option
from farandole.launch import run
from farandole.launch.agent_connection import StartError, package_place
from farandole.launch.job import Job
from farandole.launch.output import Lines
from farandole.tools.demo_rank import EPOCHS, SAMPLES

RANKS = 3
KILL_IN_EPOCH = 3
QUIET_SECONDS = 30.0  # the ranks must end within this time after their last line


class RankOutput:
    """The lines of JSON from the ranks, in the order in which they arrive."""

    def __init__(self) -> None:
        self.found: queue.Queue[dict[str, Any]] = queue.Queue()
        self.errors = b""
        self._lines: dict[int, Lines] = {}

    def feed(self, rank: int, stream: int, data: bytes) -> None:
        """Bytes of one stream of one worker."""
        if stream == 1:
            self.errors = (self.errors + data)[-20_000:]
            return
        for line in self._lines.setdefault(rank, Lines()).feed(data):
            if line.startswith(b"{"):
                self.found.put(json.loads(line))


def start(words: RankOutput) -> Job:
    """Starts the job."""
    code = "from farandole.tools.demo_rank import main; main()"
    code = f"import sys; sys.path.insert(0, {package_place()!r}); {code}"
    bounds = ["-np", str(RANKS), "--min-np", "1", "--max-np", str(RANKS), "-H", f"localhost:{RANKS}"]
    environ = {**environment(), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    options = option.parse([*bounds, sys.executable, "-c", code], environ)
    run.check(options)
    elastic_options = run.make_elastic_options(options)
    assert elastic_options is not None
    return Job(run.make_plan(options, environ), words, elastic=elastic_options)


class Demo:
    """Prints what happens, and kills a rank."""

    def __init__(self, kill: bool) -> None:
        self.kill = kill
        self.began = time.monotonic()
        self.killed: float | None = None
        self.pids: list[int] = []
        self.ends: list[dict[str, Any]] = []
        self.sizes: list[int] = []

    def say(self, text: str, at: float | None = None) -> None:
        """Prints a line with its time."""
        print(f"  {(at or time.monotonic()) - self.began:5.1f} s  {text}", flush=True)

    def add_event(self, words: dict[str, Any]) -> None:
        """Handles a line from a rank."""
        if words["kind"] == "begin":
            self.sizes.append(words["size"])
            self.pids = words["pids"]
            since = "" if self.killed is None else f", {words['time'] - self.killed:.2f} s after the kill"
            from_where = f"from commit {words['commit']}" if words["step"] else "from the beginning"
            self.say(
                f"generation {words['generation']}: {words['size']} ranks go on {from_where}{since}", words["time"]
            )
        elif words["kind"] == "epoch":
            self.say(
                f"epoch {words['epoch'] + 1} of {EPOCHS} on {words['size']} ranks: loss {words['loss']:.4f}",
                words["time"],
            )
            if self.kill and self.killed is None and words["epoch"] == KILL_IN_EPOCH:
                self.killed = time.monotonic()
                os.kill(self.pids[1], signal.SIGKILL)
                self.say(f"rank 1 (process {self.pids[1]}) is killed with SIGKILL", self.killed)
        else:
            self.ends.append(words)

    def judge(self) -> bool:
        """Checks the end of the job. Returns whether everything is right."""
        weights = {end["weights"] for end in self.ends}
        lost, duplicated = (max(end[kind] for end in self.ends) for kind in ("lost", "duplicated"))
        equal = "equal" if len(weights) == 1 else "NOT EQUAL"
        print(f"\n  weights of {len(self.ends)} ranks: {equal} (sha256 {min(weights)[:16]})")
        print(f"  {EPOCHS} epochs of {SAMPLES} samples: lost {lost}, duplicated {duplicated}")
        print(f"  {self.ends[0]['memory']}")
        wanted = [RANKS, RANKS - 1, RANKS] if self.kill else [RANKS]
        return len(weights) == 1 and len(self.ends) == RANKS and lost == duplicated == 0 and self.sizes == wanted


def main() -> int:
    """Runs the demo. Returns 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="farandole demo", description=__doc__)
    parser.add_argument("--kill", action="store_true", help="kill one of the ranks on the way")
    wish = parser.parse_args()
    print(f"demo: {RANKS} ranks on this host train a small network (about 12 s)", flush=True)
    words, show = RankOutput(), Demo(wish.kill)
    try:
        with start(words) as job:
            while len(show.ends) < RANKS and not job.over:
                with contextlib.suppress(queue.Empty):
                    show.add_event(words.found.get(timeout=0.1))
            code = job.wait(QUIET_SECONDS)
    except StartError as error:
        sys.exit(str(error))
    if code != 0 or not show.ends:
        sys.stderr.write(words.errors.decode(errors="replace"))
        sys.exit(f"demo: the job failed ({code})")
    return 0 if show.judge() else 1


if __name__ == "__main__":
    sys.exit(main())
