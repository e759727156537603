"""One rank of a pool: joins its library, then does what is asked, one line of JSON at a time, until told to end.
Touches two named pipes and the barrier's file in the pool's folder; answers every line with one line."""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from .collectives import Collectives, Memory
from .libraries import Arrays, Limits, make
from .library import Library
from .together import Together
from .training import Training

Answer = dict[str, Any]


class Rank:
    """What a rank can be asked for."""

    def __init__(self, library: Library, folder: Path, module: str) -> None:
        self.library = library
        self.together = Together(str(folder / "together"), library.rank, library.size)
        self.collectives = {name: Collectives(self.together) for name in ("torch", "numpy")}
        self.memory_limits = Memory(self.together)
        self.training = Training(library, self.together)
        # Our library takes NumPy arrays and torch's tensors in the same job.
        self.arrays: Library | None = Arrays() if module.startswith("farandole") else None
        if self.arrays is not None:
            self.arrays.open()

    def collective(self, command: dict[str, Any]) -> Answer:
        """A collective, through torch or NumPy; or a limit."""
        if isinstance(self.library, Limits):
            return self.memory_limits.run(self.library, command)
        library = self.arrays if command["interface"] == "numpy" and self.arrays is not None else self.library
        return self.collectives[command["interface"]].run(library, command)

    def train(self, command: dict[str, Any]) -> Answer:
        """Training steps."""
        return self.training.run(command)

    def trace(self, command: dict[str, Any]) -> Answer:
        """Training steps with a timeline."""
        return self.training.trace(command)

    def life(self, command: dict[str, Any]) -> Answer:
        """Leaves and joins again, `count` times."""
        times = []
        self.library.close()
        for _ in range(command["count"]):
            self.together.wait()
            began = time.perf_counter()
            self.library.open()
            self.together.wait()  # Gloo fails when somebody leaves while another still joins
            self.library.close()
            times.append(time.perf_counter() - began)
        self.together.wait()
        self.library.open()
        self.together.wait()
        return {"times": times}

    def idle(self, command: dict[str, Any]) -> Answer:
        """What this process costs while it does nothing: all its threads."""
        time.sleep(0.2)  # until waiting threads have given up looking
        before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        time.sleep(command["seconds"])
        after, seconds = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter() - began
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        switches = after.ru_nvcsw + after.ru_nivcsw - before.ru_nvcsw - before.ru_nivcsw
        return {"cpu_percent": 100 * cpu / seconds, "switches": switches / seconds}

    def memory(self, command: dict[str, Any]) -> Answer:
        """Proportional set size: pages shared with others count as a part."""
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return {"pss": int(line.split()[1]) << 10}
        raise RuntimeError("the kernel does not say how much memory this process has")


def serve(rank: Rank, folder: Path) -> None:
    """Runs commands until "end"."""
    number = rank.library.rank
    with open(folder / f"commands.{number}") as commands, open(folder / f"answers.{number}", "w") as answers:
        print(json.dumps({"ready": rank.library.size}), file=answers, flush=True)
        for line in commands:
            command = json.loads(line)
            if command["do"] == "end":
                break
            try:
                answer = getattr(rank, command["do"])(command)
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)
    rank.library.close()


def main() -> None:
    """One rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("library", choices=["horovod", "gloo", "mpi", "alone", "limits", "streams"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--module", default="", help="who serves Horovod's interface")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--size", type=int, default=1)
    parser.add_argument("--meet", default="", help="where torch.distributed meets; addresses of streams")
    parser.add_argument("--core", type=int, default=-1, help="stay on this core")
    options = parser.parse_args()
    if options.core >= 0:
        os.sched_setaffinity(0, {options.core})
    library = make(options.library, options.rank, options.size, options.meet, options.module)
    library.open()
    serve(Rank(library, options.folder, options.module), options.folder)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
