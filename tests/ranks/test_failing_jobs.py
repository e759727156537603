# Real jobs that fail: the root cause is reported with its output, however it ended and whichever rank ended first.
# Touches processes and, for memory, a control group.
from __future__ import annotations

import os
import secrets
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import SOURCE

pytestmark = pytest.mark.ranks
PROGRAM = """
import os, sys
import numpy as np, farandole as hvd
hvd.init()
for step in range(100000):
    if step == 5 and hvd.rank() == 1:
        HERE
    hvd.allreduce(np.ones(3), name="x")
"""
ALL_RAISE = """
import farandole as hvd
hvd.init()
hvd.barrier()
raise ValueError(f"bad data of rank {hvd.rank()}")
"""
CASES = {
    "sys.exit(7)": (7, "exit code 7", ""),
    "os._exit(9)": (9, "exit code 9", ""),
    "raise ValueError('bad data')": (1, "exit code 1", "[1]<stderr>:ValueError: bad data\n"),
    "os.kill(os.getpid(), 9)": (137, "killed by SIGKILL", ""),
    "os.abort()": (134, "killed by SIGABRT", ""),
    "hvd.shutdown(); sys.exit('left early')": (1, "exit code 1", "left early"),
}


def run(body: str, **more: str) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.replace("HERE", body)
    command = [sys.executable, "-m", "farandole", "run", "-np", "3", sys.executable, "-c", program]
    env = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", **more}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("body", CASES)
def test_row_8_the_rank_with_the_root_cause_is_named(body: str) -> None:
    code, message, last = CASES[body]
    done = run(body)
    assert done.returncode == code, done.stderr
    assert " on localhost) failed first: " + message in done.stderr and "rank 1 (process" in done.stderr, done.stderr
    assert "collateral, because rank 1 was gone: rank 0, 2" in done.stderr, done.stderr
    assert last in done.stderr and done.stderr.count("failed first") == 1
    if "raise" in body:
        # One traceback, that of rank 1; the others say in a line why they end, and the launcher repeats that line.
        assert done.stderr.count("Traceback") == 1, done.stderr
        assert done.stderr.count("rank 1 ended with ValueError: bad data (<string>:7)") == 2, done.stderr
        assert "failed first: exit code 1: ValueError: bad data (<string>:7)" in done.stderr, done.stderr


def test_tracebacks_leave_out_our_frames_unless_the_user_wants_them() -> None:
    for wish, traces, frames in (("short", 1, False), ("full", 3, True)):
        said = run("hvd.allreduce('no array', name='y')", FARANDOLE_TRACEBACKS=wish).stderr
        assert said.count("Traceback") == traces and ("/farandole/operations/" in said) == frames, said
        assert ("FARANDOLE_TRACEBACKS=full shows them" in said) == (not frames), said


def test_ranks_that_fail_by_themselves_are_told_apart() -> None:
    """All three raise in the same step, each its own exception: none of them failed because of another."""
    command = [sys.executable, "-m", "farandole", "run", "-np", "3", sys.executable, "-c", ALL_RAISE]
    # However long the others take on a busy machine, the launcher does not end them.
    env = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "FARANDOLE_SURVIVOR_GRACE_SECONDS": "40"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "collateral" not in done.stderr, done.stderr
    assert done.stderr.count("failed first: exit code 1") == 1, done.stderr
    assert done.stderr.count("failed by itself too: exit code 1: ValueError: bad data of rank ") == 2, done.stderr


def test_a_rank_that_leaves_with_code_0_is_mentioned() -> None:
    done = run("sys.exit(0)")
    assert done.returncode == 1 and "rank 1 had ended before with exit code 0" in done.stderr, done.stderr


def test_row_18_a_rank_that_the_kernel_killed_for_its_memory() -> None:
    above = Path("/sys/fs/cgroup/memory")
    if not os.access(above / "memory.limit_in_bytes", os.R_OK) or not os.access(above, os.W_OK):
        pytest.skip("no control group for memory can be made here (needs root and version 1 of control groups)")
    with open("/proc/self/cgroup") as table:
        own = next(line.rstrip("\n").split(":", 2)[2] for line in table if ":memory:" in line)
    folder = above / own.lstrip("/") / f"farandole-test-{secrets.token_hex(4)}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(300 << 20))
    except OSError as error:
        pytest.skip(f"no control group for memory can be made here: {error}")
    try:
        enter = f"echo $$ > {shlex.quote(str(folder))}/cgroup.procs && exec "
        code = "import os, time\nif os.environ['RANK'] == '1':\n    hog = b'x' * (600 << 20)\n"
        code += "time.sleep(60)"  # sleep: until it is killed
        message = [sys.executable, "-m", "farandole", "run", "-np", "2", sys.executable, "-c", code]
        env = {**os.environ, "PYTHONPATH": SOURCE}
        script = enter + shlex.join(message)
        done = subprocess.run(["sh", "-c", script], env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 137, done.stderr
        assert "rank 1 (process" in done.stderr and "killed by the kernel: out of memory" in done.stderr, done.stderr
    finally:
        folder.rmdir()


LITTLE_MEMORY = """
import os, resource, numpy as np, farandole as hvd
hvd.init()
mine = np.ones(16 << 20, dtype=np.float32)
hvd.allgather(np.ones(4), name="small")
if hvd.rank() == 1:
    pages = int(open("/proc/self/statm").read().split()[0])
    most = pages * resource.getpagesize() + (32 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
for name in ("large", "afterwards"):
    try:
        hvd.allgather(mine, name=name)
    except Exception as error:
        os.write(1, f"{hvd.rank()} {name} {type(error).__name__}: {error}\\n".encode())
hvd.shutdown()
"""


def test_row_18_memory_that_runs_out_is_an_error_on_every_rank() -> None:
    """The rank without memory reports this; the others report that this rank cannot continue. No rank aborts."""
    message = [sys.executable, "-m", "farandole", "run", "-np", "2"]
    env = {**os.environ, "PYTHONPATH": SOURCE}
    done = subprocess.run(
        [*message, sys.executable, "-c", LITTLE_MEMORY], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    text = "cannot allocate 134217728 bytes for a result"
    lines = [f"0 {name} Revoked: Horovod has been shut down: rank 1 {text}" for name in ("afterwards", "large")]
    lines += [f"1 {name} MemoryError: {text}" for name in ("afterwards", "large")]
    assert sorted(line.partition(":")[2] for line in done.stdout.splitlines()) == lines, done.stdout
