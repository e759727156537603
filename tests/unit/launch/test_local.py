# Jobs of real processes: codes, output, signals, and nothing left behind.
# Touches processes.
from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from waiting import in_time, until

from farandole.launch import local
from farandole.launch.agent_connection import StartError
from farandole.launch.output import LONGEST_LINE, MemorySink, PrefixedLines

pytestmark = pytest.mark.ranks
RANK = "import os, sys, time; rank = int(os.environ['FARANDOLE_RANK']); "


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", RANK + code]  # -S: starts sooner


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_output_is_kept_per_rank_and_stream() -> None:
    with local.start(python("print('out', rank); print('err', rank, file=sys.stderr)"), 3) as job:
        assert job.wait(60) == 0 and job.failure is None and job.codes == [0, 0, 0]
        for rank in range(3):
            assert (job.stdout(rank), job.stderr(rank)) == (f"out {rank}\n", f"err {rank}\n")


def test_much_output_does_not_block() -> None:
    with local.start(python("sys.stdout.write('x' * 1_000_000)"), 2) as job:
        assert job.wait(60) == 0 and len(job.stdout(1)) == 1_000_000


def test_the_first_failure_ends_the_others_and_gives_its_code() -> None:
    began = time.monotonic()
    code = "sys.exit(7) if rank == 1 else time.sleep(60)"  # sleep: until it is killed
    with local.start(python(code), 3, env={"FARANDOLE_SURVIVOR_GRACE_SECONDS": "0"}) as job:
        assert job.wait(60) == 7
        assert job.failure == (1, 7) and job.codes == [143, 7, 143]
    in_time(time.monotonic() - began, 10.0, "a job whose other ranks are asked to end")


def test_survivors_have_time_to_report_their_error(tmp_path: Path) -> None:
    code = f"""
place = {str(tmp_path / "pid")!r}
if rank == 1:
    open(place + ".new", "w").write(str(os.getpid()))
    os.rename(place + ".new", place)
    sys.exit(7)
if rank == 2:
    time.sleep(60)  # sleep: until it is killed
while not os.path.exists(place) or os.path.exists("/proc/" + open(place).read()):
    time.sleep(0.01)  # sleep: between two looks
for line in range(20):
    time.sleep(0.01)  # sleep: a long traceback takes its time
    print("line", line, file=sys.stderr, flush=True)
sys.exit(3)
"""
    with local.start(python(code), 3) as job:
        assert job.wait(60) == 7
        assert job.failure == (1, 7) and job.codes == [3, 7, 143]
        assert job.stderr(0).splitlines() == [f"line {number}" for number in range(20)]


def test_ranks_that_ignore_the_request_are_killed() -> None:
    code = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); "
        "sys.stdin.read() if rank else None; os.kill(os.getpid(), signal.SIGSTOP) if rank == 0 else "
        "time.sleep(60)"  # sleep: until it is killed
    )
    with local.start(python(code), 2) as job:
        until(lambda: job.stdout(0) == job.stdout(1) == "up\n")
        job.stop(grace=0.1)
        job.wait(60)
        assert job.codes == [137, 137]


def test_the_other_ranks_continue_if_the_option_is_set() -> None:
    with local.start(python("sys.exit(5) if rank == 0 else print('done')"), 2, stop_on_failure=False) as job:
        assert job.wait(60) == 5 and job.stdout(1) == "done\n" and job.codes == [5, 0]


def test_a_killed_rank() -> None:
    with local.start(["sleep", "60"], 2) as job:
        job.kill(1)
        assert job.wait(60) == 137 and job.failure == (1, 137)


def test_leaving_the_block_ends_everything_and_its_children() -> None:
    with local.start(["sh", "-c", "sleep 60 & sleep 60 & wait"], 2) as job:
        children: list[int] = []

        def grandchildren() -> bool:
            children[:] = [
                int(pid)
                for parent in job.pids
                for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
            ]
            return len(children) == 4

        until(grandchildren)
        directory = job.directory
    until(lambda: not any(alive(pid) for pid in [*job.pids, *children]))
    assert not os.path.exists(directory)
    job.close()


def test_children_of_a_rank_end_with_it() -> None:
    with local.start(["sh", "-c", "sleep 60 & echo $!"], 1) as job:
        assert job.wait(60) == 0
        until(lambda: not alive(int(job.stdout(0))))


def test_waiting_has_a_limit() -> None:
    with local.start(["sleep", "60"], 2) as job:
        with pytest.raises(TimeoutError, match=r"\[0, 1\]"):
            job.wait(0.05)


def test_a_command_that_does_not_exist_leaves_nothing() -> None:
    with pytest.raises(FileNotFoundError):
        local.start(["no-such-program"], 2)


def test_an_error_in_the_thread_of_the_job_is_a_failure() -> None:
    with local.start(["sleep", "60"], 2) as job:
        job._loop.call(lambda: [][0])
        assert job.wait(60) == 1 and job.failure == (-1, 1)
        assert "the launcher itself has failed" in job.reason and "IndexError" in job.reason
        pids = job.pids
    assert not any(alive(pid) for pid in pids)


def test_long_command_lines() -> None:
    with local.start(["sh", "-c", "echo $#", *["x" * 100_000] * 13], 2) as job:
        assert job.wait(60) == 0 and job.stdout(1) == "12\n"
    with pytest.raises(OSError, match="Argument list too long"):
        local.start(["true", "x" * 900_000], 1)
    with pytest.raises(StartError, match="a word of the command has 2000000 bytes, the limit is 1024000"):
        local.start(["true", "x" * 2_000_000], 1)
    with pytest.raises(StartError, match="an environment variable has 2000002 bytes, the limit is 1024000"):
        local.start(["true"], 1, env={"X": "x" * 2_000_000})


def test_bad_arguments() -> None:
    for arguments, message in (
        ({"command": ["true"], "np": 0}, "at least one"),
        ({"command": [], "np": 1}, "no command"),
        ({"command": ["true"], "np": 2, "hosts": ["a"]}, "1 names for 2 ranks"),
        ({"command": ["true"], "np": 1, "output": "loud"}, "loud"),
    ):
        with pytest.raises(ValueError, match=message):
            local.start(**arguments)  # type: ignore[arg-type]


HUGE = "glibc.malloc.hugetlb=1"
TRIM = "glibc.malloc.trim_threshold=1"
OTHER = "glibc.rtld.nns=5"


def _who_asks_gets_huge_pages() -> bool:
    """And nobody else; of 2 MiB, so that the blocks below hold some."""
    content = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return content.exists() and "[madvise]" in content.read_text() and os.sysconf("SC_PAGE_SIZE") == 4096


@pytest.mark.parametrize(
    ("before", "expected", "kept"),
    [
        ({}, ["10000", str(1 << 30), HUGE], True),
        ({"MIMALLOC_PURGE_DELAY": "10"}, ["10", str(1 << 30), HUGE], True),
        ({"GLIBC_TUNABLES": OTHER}, ["10000", str(1 << 30), f"{OTHER}:{HUGE}"], True),
        ({"MALLOC_TOP_PAD_": "0"}, ["10000", None, None], False),
        ({"GLIBC_TUNABLES": TRIM}, ["10000", None, TRIM], False),
    ],
    ids=["nothing said", "mimalloc", "other tunables", "malloc", "tunables"],
)
def test_memory_is_kept_between_steps(
    monkeypatch: pytest.MonkeyPatch, before: dict[str, str], expected: list[Any], kept: bool
) -> None:
    """And the C library takes the settings: a freed block does not go back to the kernel, its pages are huge ones."""
    for name in [name for name in os.environ if "MALLOC_" in name or name == "GLIBC_TUNABLES"]:
        monkeypatch.delenv(name)
    code = """
import ctypes, json, os, resource
library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]
faults = []
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = library.malloc(64 << 20)
    ctypes.memset(block, 1, 64 << 20)
    library.free(block)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
names = ["MIMALLOC_PURGE_DELAY", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"]
print(json.dumps([[*map(os.environ.get, names)], faults[1] < faults[0] // 4, faults[0]]), end="")
"""
    pages = (64 << 20) // os.sysconf("SC_PAGE_SIZE")
    with local.start(python(code), 2, env=before) as job:
        assert job.wait(60) == 0
        for rank in range(2):
            variables, remained, faults = json.loads(job.stdout(rank))
            assert (variables, remained) == (expected, kept)
            if _who_asks_gets_huge_pages():
                assert (faults < pages // 4) == kept


@pytest.mark.parametrize(("before", "expected"), [({}, None), ({"OMP_NUM_THREADS": "5"}, "5")])
def test_threads_are_divided_among_ranks(
    monkeypatch: pytest.MonkeyPatch, before: dict[str, str], expected: str | None
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    content: list[str] = []
    command = python("print(os.environ['OMP_NUM_THREADS'], end='')")
    with local.start(command, 2, env=before, say=content.append) as job:
        assert job.wait(60) == 0
        assert job.stdout(1) == (expected or str(max(1, len(os.sched_getaffinity(0)) // 2)))
    assert len(content) == (expected is None)


def test_ranks_die_with_their_launcher() -> None:
    code = (
        "from farandole.launch import local; job = local.start(['sleep', '60'], 2); "
        "print(*job.pids, job.directory, flush=True); job.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        *message, directory = launcher.stdout.readline().split()
        pids = [int(word) for word in message]
        assert all(alive(pid) for pid in pids) and os.path.exists(directory)
        launcher.kill()
        until(lambda: not any(alive(pid) for pid in pids) and not os.path.exists(directory), timeout=2.0)


def test_output_lines_begin_with_rank_and_stream(tmp_path: Path) -> None:
    with open(tmp_path / "out", "w+b") as target:
        marked = PrefixedLines(4, (target, target))
        for part in (b"a", b"b\nc\n\nd", b"", b"x" * (LONGEST_LINE + 1), b"", b""):
            marked.feed(3, 0, part)
        target.seek(0)
        lines = target.read().splitlines()
    assert lines[:4] == [b"[3]<stdout>:ab", b"[3]<stdout>:c", b"[3]<stdout>:", b"[3]<stdout>:d"]
    assert lines[4] == b"[3]<stdout>:" + b"x" * (LONGEST_LINE + 1) and len(lines) == 5
    kept = MemorySink(1)
    kept.feed(0, 1, b"\xff\n")
    assert kept.text(0, 1) == "�\n"
