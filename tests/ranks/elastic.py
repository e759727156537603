# An elastic job for tests: the real launcher with a user's command line, ranks that report events, injected faults.
# Touches processes and the files it is given.
"""`ElasticJob(words, tmp_path)` starts `farandole run`. Its ranks report every change of their world as a line of
JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from waiting import until

import farandole

SOURCE = str(Path(farandole.__file__).parents[1])
RUN = [sys.executable, "-m", "farandole", "run"]
LONG = "CHAOS_N" in os.environ  # `make chaos`: long tests run in full
# Children as data loaders have them: one in its parent's session, one in a session of its own.
CHILDREN = """
import os, time
def fork_children():
    for kind in ("loader", "setsid"):
        if os.fork() == 0:
            if kind == "setsid":
                os.setsid()
            time.sleep(120)  # sleep: until it is killed
            os._exit(0)
"""
# Runs steps until the file FINISH exists. `weights` is the state: every step changes it, so that two histories differ.
PROGRAM = (
    CHILDREN
    + """
import ctypes, faulthandler, hashlib, json, os, sys, threading, time
import numpy as np
import farandole as hvd
from farandole.base.errors import HorovodInternalError, HostsUpdatedInterrupt
from farandole.world.runtime import runtime
faulthandler.dump_traceback_later(float(os.environ.get("JOB_SECONDS", "200")), exit=True)
finish = os.environ["JOB_FINISH"]
saves = os.environ.get("JOB_SAVES", "")
step, commits, weights = 0, 0, np.zeros(64)
folder = os.environ.get("JOB_LEDGER")
ledger = open(f"{folder}/{os.environ['FARANDOLE_WORKER']}", "a") if folder else None

def say(event, **more):
    now = time.monotonic()
    line = {"event": event, "t": now, "pid": os.getpid(), "worker": int(os.environ["FARANDOLE_WORKER"]), **more}
    sys.stdout.write("event " + json.dumps(line) + "\\n")
    sys.stdout.flush()

def place():
    world = runtime.world
    return {"rank": hvd.rank(), "size": hvd.size(), "generation": world.session.generation, "step": step,
            "host": world.config.hostname,
            "local": [hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()],
            "hash": hashlib.sha256(weights.tobytes()).hexdigest()[:16]}

def sync():
    global step, commits, weights
    found = hvd.broadcast(np.concatenate([[step, commits], weights]), 0, name="sync")
    step, commits, weights = int(found[0]), max(1, int(found[1])), found[2:].copy()

def work():
    time.sleep(0.005)  # sleep: stands for the computation of a step

def pause():
    while open(os.environ["JOB_ORDERS"]).read().strip() == f"gil {os.getpid()}":
        say("gil")
        ctypes.PyDLL(None).sleep(int(os.environ.get("JOB_GIL", "7")))  # sleep: the fault, a GIL that is held
        say("no gil")
        open(os.environ["JOB_ORDERS"], "w").close()
    if open(os.environ["JOB_ORDERS"]).read().strip() == f"raise {os.getpid()}":
        raise ValueError("the user's own error")

def age():
    began = int(open("/proc/self/stat").read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began

say("imported", seconds=age())
hvd.init()
if saves:
    runtime.membership.set_saving(True)
if os.environ.get("JOB_CHILDREN"):
    fork_children()
say("up", **place())
fresh = True
while True:
    try:
        if fresh:
            sync()
            fresh = False
            say("world", **place())
        stamp, result, deadline = runtime.notifications.pending()
        mine = np.concatenate([[stamp, deadline is not None, os.path.exists(finish)], np.full(64, step % 7 + 1.0)])
        found = hvd.allreduce(mine, op=hvd.Max, name="step")
        weights = weights * 0.5 + found[3:] + runtime.world.session.generation
        step, commits = step + 1, commits + 1
        if ledger:
            ledger.write(f"{runtime.world.session.generation} {hvd.size()} {step} {time.monotonic()}\\n")
            ledger.flush()
        pause()
        work()
        if found[2]:
            break
        if found[0]:
            if found[1] and saves:
                with open(f"{saves}/{os.getpid()}-{step}", "x"):
                    runtime.membership.set_saved()
            raise HostsUpdatedInterrupt
    except HorovodInternalError as error:
        say("lost", error=str(error), kind=type(error).__name__, blames=getattr(error, "rank", None), step=step)
        runtime.reset(commits)
        fresh = True
    except HostsUpdatedInterrupt:
        say("updated", result=result, step=step)
        runtime.reset(commits)
        fresh = True
say("end", **place())
hvd.shutdown()
"""
)


class ElasticJob:
    """A running elastic job. Use it as a context manager."""

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        env: Mapping[str, str] | None = None,
        program: str = PROGRAM,
        start: Callable[..., subprocess.Popen[bytes]] | None = None,
        command: Sequence[str] = (),
    ) -> None:
        """`command`: arguments for `farandole` that replace `run` and the program of the ranks."""
        self.finish_file = folder / "finish"
        self.orders = folder / "orders"
        self.orders.write_text("")
        environment = {
            "PYTHONPATH": SOURCE,
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "JOB_FINISH": str(self.finish_file),
            "JOB_ORDERS": str(self.orders),
            **(env or {}),
        }
        command = [*RUN[:-1], *command] if command else [*RUN, *arguments, sys.executable, "-c", program]
        if start is not None:
            self.process = start(command, environment)
        else:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.events: list[dict[str, Any]] = []
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, name="Thread-pytest-job", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            text = line.decode(errors="replace").rstrip()
            self.lines.append(text)
            if "event {" in text:
                with contextlib.suppress(ValueError):
                    self.events.append(json.loads(text.partition("event ")[2]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()

    # Looking.

    def wait(self, done: Callable[[], Any], seconds: float = 60.0, what: str = "") -> Any:
        """Waits until `done()` returns a true value, and returns it."""
        return until(
            done,
            seconds,
            lambda: f"{what or 'it'} (exit {self.process.poll()}):\n{self.tail()}",
            lambda: self.process.poll() is None,
            every=0.002,
        )

    def tail(self, count: int = 80) -> str:
        return "\n".join(self.lines[-count:])

    def lines_with(self, word: str) -> list[str]:
        """The lines of the launcher that contain this word."""
        if self.process.poll() is not None:
            self._reader.join(10)  # the last output may still be in the pipe
        return [line for line in self.lines if line.startswith("farandole:") and word in line]

    @property
    def generation(self) -> int:
        return max((event["generation"] for event in self.events if event["event"] == "world"), default=0)

    def members(self) -> dict[int, dict[str, Any]]:
        """The newest world that all its members have reported, by rank."""
        newest = self.generation
        found = {e["rank"]: e for e in self.events if e["event"] == "world" and e["generation"] == newest}
        return found if found and len(found) == next(iter(found.values()))["size"] else {}

    def world(self, size: int, after: int = 0, seconds: float = 60.0) -> dict[int, dict[str, Any]]:
        """Waits for a world of this size, in a generation after that one."""

        def there() -> dict[int, dict[str, Any]]:
            found = self.members()
            return found if len(found) == size and self.generation > after else {}

        found: dict[int, dict[str, Any]] = self.wait(there, seconds, f"a world of {size} after generation {after}")
        assert len({event["hash"] for event in found.values()}) == 1 and len({e["step"] for e in found.values()}) == 1
        return found

    def import_seconds(self, number: int, by: str = "pid") -> float:
        """The time from the start of a process to its `init`."""
        return float(self.of(number, "imported", by)[0]["seconds"])

    def of(self, number: int, name: str = "", by: str = "pid") -> list[dict[str, Any]]:
        """The events of one process. If each host has its own process ids, use `by="worker"`, the worker's number."""
        return [event for event in self.events if event[by] == number and name in ("", event["event"])]

    def finish(self, seconds: float = 60.0) -> None:
        """Lets the ranks end, and checks how they ended."""
        members = self.members()
        self.finish_file.touch()
        assert self.process.wait(seconds) == 0, self.tail()
        self._reader.join(10)
        ends = [event for event in self.events if event["event"] == "end"]
        assert {event["pid"] for event in ends} >= {event["pid"] for event in members.values()}, self.tail()
        assert len({(event["hash"], event["step"]) for event in ends}) == 1, ends


def discover(folder: Path, text: str) -> tuple[Path, Path]:
    """Makes a list of hosts, and a script that prints it. `looks` counts how often the script ran."""
    listed, script = folder / "hosts", folder / "discover"
    listed.write_text(text)
    script.write_text(f"#!/bin/sh\ncd {shlex.quote(str(folder))}\ncat hosts\necho >> looks\n")
    script.chmod(0o755)
    return listed, script


def looks(folder: Path) -> int:
    """How often a script of `discover` has printed its whole list."""
    return len((folder / "looks").read_text())


def split_brains(folder: Path) -> tuple[list[int], int]:
    """Steps that all members of two different generations have committed, and how many steps there are."""
    done: dict[tuple[int, int], int] = {}
    sizes: dict[int, int] = {}
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            generation, size, step = map(int, line.split()[:3])
            sizes[generation] = size
            done[generation, step] = done.get((generation, step), 0) + 1
    owners: dict[int, set[int]] = {}
    for (generation, step), count in done.items():
        if count == sizes[generation]:
            owners.setdefault(step, set()).add(generation)
    return [step for step, found in owners.items() if len(found) > 1], len(owners)


def within(host: Any) -> Callable[[list[str], dict[str, str]], subprocess.Popen[bytes]]:
    """How an ElasticJob is started in a host of tests/bed."""

    def start(command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        started: subprocess.Popen[bytes] = host.start(
            command, env, "/", stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        return started

    return start


def kill(pid: int, number: int = signal.SIGKILL) -> float:
    """Sends a signal. Returns the time."""
    moment = time.monotonic()
    os.kill(pid, number)
    return moment


def children_of(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        text = "".join(
            Path(f"/proc/{pid}/task/{task}/children").read_text() for task in os.listdir(f"/proc/{pid}/task")
        )
        return [int(word) for word in text.split()]
    return []


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
