# Elastic jobs for the fault tests: started like a user's job and watched through their files; tests inject faults.
# Touches only processes of its own jobs.
"""`ElasticRun` starts `farandole run` with a program; `kill` kills a rank of it, `results` reads its result files."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ledger import Counts, count
from waiting import until

ROOT = Path(__file__).parents[2]
LAUNCH = "import sys; from farandole.launch.cli import main; sys.exit(main())"


class ElasticRun:
    """A running elastic job on this host; its launcher is killed when the test is over."""

    def __init__(self, scratch: Path, program: Sequence[str], np: int = 3, hosts: str = "", **env: str) -> None:
        self.scratch = scratch
        self.np = np
        # For the files that data loaders of killed ranks leave; a short path, since it contains their sockets.
        self.temporary = tempfile.TemporaryDirectory()
        scratch.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}:{Path(__file__).parent}",  # for elastic_files.py
            "OMP_NUM_THREADS": "1",
            "SCRATCH": str(scratch),
            "TMPDIR": self.temporary.name,
            **env,
        }
        bounds = ["-np", str(np), "--min-np", "1", "--max-np", str(np), "-H", hosts or f"localhost:{np}"]
        command = [sys.executable, "-c", LAUNCH, "run", *bounds, sys.executable, *program]
        self.output_file = open(scratch / "output", "wb")  # noqa: SIM115
        self.process = subprocess.Popen(
            command, env=environment, stdout=self.output_file, stderr=self.output_file, cwd=ROOT
        )

    def __enter__(self) -> ElasticRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.output_file.close()
        self.temporary.cleanup()

    def output(self) -> str:
        """Everything that the job has printed."""
        return (self.scratch / "output").read_text(errors="replace")

    def progress(self) -> dict[str, Any]:
        """The newest report of rank 0."""
        try:
            found: dict[str, Any] = json.loads((self.scratch / "progress").read_text())
        except FileNotFoundError:
            return {"step": -1, "size": 0, "generation": 0, "pids": []}
        return found

    def until(self, done: Callable[[dict[str, Any]], bool], seconds: float = 60.0) -> dict[str, Any]:
        """Reads the progress until the condition is true."""

        def reached() -> dict[str, Any]:
            now = self.progress()
            return now if done(now) else {}

        return until(
            reached,
            seconds,
            lambda: f"still {self.progress()}: {self.output()[-4000:]}",
            lambda: self.process.poll() is None,
        )

    def kill_at_random(self, draw: random.Random, full: bool = True) -> tuple[float, float]:
        """Kills a rank some steps from now. Returns seconds until the others continue, and until all ranks are back."""
        wanted = self.np if full else 2
        now = self.until(lambda now: now["size"] >= wanted)
        steps = now["step"] + draw.randrange(1, 12)
        now = self.until(lambda now: now["step"] >= steps and now["size"] >= wanted)
        began = time.monotonic()
        os.kill(now["pids"][draw.randrange(now["size"])], signal.SIGKILL)
        after = self.until(lambda later: later["generation"] > now["generation"])
        continued_s = after["time"] - began
        if full:
            after = self.until(lambda later: later["size"] == self.np and later["generation"] > now["generation"])
        return continued_s, after["time"] - began

    def hurt_agent(self, rank: int, number: int) -> None:
        """Sends a signal to the agent of a rank's host. A scheduler that needs the host sends SIGTERM."""
        pid = self.progress()["pids"][rank]
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(parent, number)

    def finish(self, seconds: float = 60.0) -> int:
        """Asks the program to end. Returns the launcher's exit code."""
        (self.scratch / "finish").touch()
        return self.process.wait(seconds)

    def results(self) -> list[dict[str, Any]]:
        """The result file of each rank."""
        return [json.loads(file.read_text()) for file in sorted(self.scratch.glob("result.*"))]

    def counts(self) -> Counts:
        """Counts of lost, repeated and padded samples; all ranks have the same ledger."""
        results = self.results()
        assert len(results) >= 1 and all(one["used"] == results[0]["used"] for one in results)
        assert len({one["weights"] for one in results}) == 1
        return count(results[0]["used"], results[0]["padded"])
