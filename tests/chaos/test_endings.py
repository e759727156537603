# Launcher, guard, agent and ranks are killed at random moments: two seconds later nothing of the job is left.
# Touches processes of its own jobs.
"""Rows 21 and 22 of the table of faults, on one host. Each job has children that a careless ending would leave."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.chaos, pytest.mark.ranks]
MOMENTS = 30 * int(os.environ.get("CHAOS_N", "1"))
SPAN_S = 1.0  # from the start of the launcher to well into training
LIMIT_S = 2.0
# Two children as of a data loader, one that left for a session of its own, and a grandchild that did so twice.
PROGRAM = """
import os, sys, time
for kind in ("loader", "loader", "setsid", "daemon"):
    if os.fork() == 0:
        if kind != "loader":
            os.setsid()
        if kind == "daemon" and os.fork():
            os._exit(0)
        time.sleep(120)
        os._exit(0)
import numpy as np, farandole as hvd
hvd.init()
while True:
    hvd.allreduce(np.ones(1000), name="x")
"""


def marked(mark: str) -> dict[int, str]:
    """The living processes that have the mark in their environment, with their short names."""
    found = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if mark.encode() not in Path(f"/proc/{entry}/environ").read_bytes():
                continue
            name, _, rest = Path(f"/proc/{entry}/stat").read_text().partition("(")[2].rpartition(")")
            if rest.split()[0] != "Z":
                found[int(entry)] = name
    return found


def ranks(mark: str) -> list[int]:
    """Processes that an agent has started."""
    found = marked(mark)
    agents = [pid for pid, name in found.items() if name == "farandole-agent"]
    children = []
    for pid in found:
        with contextlib.suppress(OSError):
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if parent in agents and os.getsid(pid) == pid:
                children.append(pid)
    return children


def victims(who: str, launcher: int, mark: str) -> list[int]:
    if who == "launcher":
        return [launcher]
    if who == "rank":
        return ranks(mark)
    return [pid for pid, name in marked(mark).items() if name == f"farandole-{who}"]


@contextlib.contextmanager
def job(mark: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "farandole", "run", "-np", "2", sys.executable, "-c", PROGRAM]
    env = {**os.environ, "FARANDOLE_TEST_MARK": mark, "PYTHONWARNINGS": "ignore"}
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, env=env, stdout=quiet, stderr=quiet, stdin=quiet) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()


def directories() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("farandole-")}


@pytest.mark.parametrize("who", ["launcher", "guard", "agent", "rank"])
def test_rows_21_22_whoever_is_killed_nothing_is_left(who: str) -> None:
    draw = random.Random(secrets.randbits(32))
    worst = 0.0
    for turn in range(MOMENTS):
        moment = draw.uniform(0.0, SPAN_S) if turn else SPAN_S + 1.0  # the first one is surely in training
        mark = f"mark-{secrets.token_hex(8)}"
        before = directories()
        with job(mark) as launcher:
            time.sleep(moment)
            while not (found := victims(who, launcher.pid, mark)):
                assert launcher.poll() is None, "the job ended before its victim was there"
                time.sleep(0.002)
            most = len(marked(mark))
            os.kill(draw.choice(found), signal.SIGKILL)
            began = time.monotonic()
            while left := (marked(mark), directories() - before):
                if not any(left):
                    break
                assert time.monotonic() - began < LIMIT_S, f"{who} killed after {moment:.3f} s, left: {left}"
                time.sleep(0.01)
            worst = max(worst, time.monotonic() - began)
            assert turn or most >= 2 + 2 * 5, "the children were there"
            assert launcher.wait(5) != 0
    print(f"{who}: {MOMENTS} moments, all gone after at most {worst:.2f} s")


def test_a_rank_that_ends_well_leaves_no_child_and_harms_no_other_ranks_child() -> None:
    mark = f"mark-{secrets.token_hex(8)}"
    program = PROGRAM.partition("import numpy")[0] + (
        "rank = int(os.environ['FARANDOLE_RANK'])\nprint(rank, flush=True)\ntime.sleep(0.3 if rank == 0 else 120)\n"
    )
    command = [sys.executable, "-m", "farandole", "run", "-np", "2", sys.executable, "-c", program]
    env = {**os.environ, "FARANDOLE_TEST_MARK": mark, "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as launcher:
        try:
            assert launcher.stdout is not None
            launcher.stdout.readline(), launcher.stdout.readline()
            deadline = time.monotonic() + 10
            # Launcher, guard, agent, one rank and its four children.
            while len(found := marked(mark)) != 3 + 1 + 4:
                assert time.monotonic() < deadline, found
                time.sleep(0.01)
            time.sleep(0.2)
            assert len(marked(mark)) == 8, "the other rank's children live on"
            launcher.send_signal(signal.SIGTERM)
            assert launcher.wait(10) == 143
            assert not marked(mark)
        finally:
            launcher.kill()
