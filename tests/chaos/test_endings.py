# Launcher, guard, agent and ranks are killed at random moments: two seconds later nothing of the job is left.
# Touches only processes of its own jobs.
"""Rows 21 and 22 of the table of faults, on one host. Each job has children that an incomplete cleanup would leave.

Of each 30 jobs (10 in `make test`) one trains from a DataLoader of torch with workers and is killed after its first
steps. Importing torch takes longer than all else here, so the others have plain children instead and are killed from
the first moment on.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from local_ranks import marked
from waiting import in_time, until

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs the list `torch` of scripts/requirements")
pytestmark = [pytest.mark.chaos, pytest.mark.ranks]
EACH = 30 if "CHAOS_N" in os.environ else 10
MOMENTS = EACH * int(os.environ.get("CHAOS_N", "1"))
SPAN_S = 1.0  # from the start of the launcher until training runs for some time; with a DataLoader: only training
LIMIT_S = 2.0
# Children in the same session, one that called setsid, and a grandchild that called it twice.
CHILDREN = """
import os, sys, time
for kind in sys.argv[1:]:
    if os.fork() == 0:
        if kind != "stays":
            os.setsid()
        if kind == "daemon" and os.fork():
            os._exit(0)
        time.sleep(120)  # sleep: until it is killed
        os._exit(0)
"""
PLAIN = """
import numpy as np, farandole as hvd
hvd.init()
while True:
    hvd.allreduce(np.ones(1000), name="x")
"""
LOADER = """
import torch, farandole.torch as hvd
class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield torch.ones(1000)
hvd.init()
for step, batch in enumerate(torch.utils.data.DataLoader(Endless(), batch_size=4, num_workers=2)):
    hvd.allreduce(batch, name="x")
    if step == 3 and hvd.rank() == 0:
        print("training", flush=True)
"""
KINDS = ("stays", "stays", "setsid", "daemon")


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


def left(mark: str, place: str) -> list[object]:
    """Processes and files of a job."""
    return [*marked(mark).items(), *fnmatch.filter(os.listdir(place), "farandole-*")]


@contextlib.contextmanager
def job(mark: str, place: str, *program: str) -> Iterator[subprocess.Popen[bytes]]:
    """A job of two ranks whose temporary files are in `place`."""
    command = [sys.executable, "-m", "farandole", "run", "-np", "2", sys.executable, "-c", *program]
    env = {**os.environ, "TEST_MARK": mark, "TMPDIR": place, "OMP_NUM_THREADS": "1"}
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=quiet, stdin=quiet) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()


@needs_torch
@pytest.mark.parametrize("who", ["launcher", "guard", "agent", "rank"])
def test_rows_21_22_whoever_is_killed_nothing_is_left(who: str) -> None:
    seed = os.environ.get("CHAOS_SEED") or str(secrets.randbits(32))
    print(f"CHAOS_SEED={seed} draws the same moments")
    draw = random.Random(seed)
    worst = 0.0
    for turn in range(MOMENTS):
        loader = turn % EACH == 0
        moment = draw.uniform(0.0, SPAN_S)
        mark = f"mark-{secrets.token_hex(8)}"
        program = (CHILDREN + LOADER, *KINDS[2:]) if loader else (CHILDREN + PLAIN, *KINDS)
        with tempfile.TemporaryDirectory() as path, job(mark, path, *program) as launcher:
            if loader:
                assert launcher.stdout is not None and b"training" in launcher.stdout.readline()
            time.sleep(moment)  # sleep: the fault itself: when it happens
            found = until(
                lambda: victims(who, launcher.pid, mark),  # noqa: B023
                60.0,
                f"no {who}",
                lambda: launcher.poll() is None,
            )
            most = len(marked(mark))
            os.kill(draw.choice(found), signal.SIGKILL)
            began = time.monotonic()
            # Python's own pymp- directories of DataLoaders stay when Python is killed, whoever started it.
            until(lambda: not left(mark, path), what=lambda: left(mark, path))  # noqa: B023
            worst = max(worst, time.monotonic() - began)
            in_time(worst, LIMIT_S, f"the end of all, {who} killed after {moment:.3f} s,")
            # Launcher, guard, agent; two ranks, each with two workers of its loader and two children of ours.
            assert not loader or most == 3 + 2 * 5, "the children were there"
            assert launcher.wait(60) != 0
    print(f"{who}: {MOMENTS} moments, all gone after at most {worst:.2f} s")


def test_a_rank_that_exits_with_0_leaves_no_child_and_other_ranks_keep_theirs(tmp_path: Path) -> None:
    mark = f"mark-{secrets.token_hex(8)}"
    gate = tmp_path / "gate"
    program = CHILDREN + (
        "print('up', flush=True)\n"
        f"while os.environ['FARANDOLE_RANK'] == '1' or not os.path.exists({str(gate)!r}):\n"
        "    time.sleep(0.01)\n"  # sleep: looks for the gate
    )
    with tempfile.TemporaryDirectory() as path, job(mark, path, program, *KINDS) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() and launcher.stdout.readline()
        # Launcher, guard, agent; two ranks, each with four children.
        until(lambda: len(marked(mark)) == 3 + 2 * 5)
        gate.touch()
        until(lambda: len(marked(mark)) <= 3 + 5)
        watched_until = time.monotonic() + 0.2
        while time.monotonic() < watched_until:
            assert len(marked(mark)) == 3 + 5, "the other rank and its children live on"
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(60) == 143
        assert not marked(mark)
