# Hangs of real jobs: the launcher names the right rank and what it does; clean jobs accuse nobody; `why`, `stacks`,
# SIGQUIT. Touches the command line, and processes that it starts.
"""Each fault is put into a job that runs. The quick tests do so once, the nightly ones as often as REPEATS says."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jobs
import pytest
from waiting import until
from world import ENGINES

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif("native" not in ENGINES, reason="the native library is not built"),
]
SCRIPT = Path(__file__).with_name("hanging.py")
REPEATS = int(os.environ.get("HANG_REPEATS", "100"))
# fault -> the kind of its verdict, and a piece of its text
KINDS = {
    "left out": ("never submitted", "left out allreduce 'allreduce.b'"),
    "order": ("other order", "in another order"),
    "ends early": ("never submitted", "it sleeps"),
    "computes": ("never submitted", "in compute_for_ever"),
    "sleeps": ("never submitted", "it sleeps"),
    "stopped": ("stopped process", "SIGSTOP"),
    "lock": ("in a lock", "take_a_lock_twice: with lock:"),
    "thread": ("in a lock", "wait_for_a_thread"),
    "file lock": ("in a lock", "lock_a_file_twice"),
    "file": ("in the file system", "read_a_file_that_does_not_come"),
    "loader": ("in a data loader", "in __getitem__"),
    "loader without workers": ("in a data loader", "__getitem__"),
}
QUICK = ("left out", "order", "stopped", "lock", "file")
WITH_TORCH = ("loader", "loader without workers")


def command(size: int, fault: str, rank: int, folder: Path, *options: str) -> list[str]:
    return [
        sys.executable, "-m", "farandole", "run", "-np", str(size), "--log-dir", str(folder), *options,
        sys.executable, str(SCRIPT), fault, str(rank), str(folder / "place"),
    ]  # fmt: skip


def environment(folder: Path, note: float = 0.5) -> dict[str, str]:
    return {
        **os.environ, "PYTHONPATH": jobs.SOURCE, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(folder / "state"),
        "FARANDOLE_STALL_NOTE_SECONDS": str(note), "FARANDOLE_STALL_CHECK_TIME_SECONDS": str(note),
    }  # fmt: skip


def hang(size: int, fault: str, rank: int, folder: Path, *options: str) -> tuple[dict[str, Any], str]:
    """Runs a job that hangs until the launcher kills it. Returns the first report and what was printed."""
    words = command(size, fault, rank, folder, "--on-hang", "kill", *options)
    done = subprocess.run(words, env=environment(folder), capture_output=True, text=True, timeout=120)
    reports = sorted(folder.glob("*/hang-1.json"))
    assert reports and done.returncode == 1, done.stdout + done.stderr
    return json.loads(reports[0].read_text()), done.stderr


def check(found: dict[str, Any], printed: str, fault: str, size: int, rank: int) -> None:
    kind, words = KINDS[fault]
    assert (found["kind"], found["ranks"]) == (kind, [rank]), found["text"]
    assert set(found["waiting"]) == set(range(size)) - {rank} and found["operation"].startswith("allreduce."), found
    assert words in found["text"], found["text"]
    assert printed.count("farandole: hang: ") == 1 and "ended by --on-hang kill" in printed, printed


@pytest.mark.parametrize("fault", QUICK)
def test_the_rank_and_what_it_does_are_named(fault: str, tmp_path: Path) -> None:
    found, printed = hang(3, fault, 1, tmp_path)
    check(found, printed, fault, 3, 1)
    text = next(tmp_path.glob("*/hang-1.txt")).read_text()
    assert "main threads:" in text and "hanging.py" in text and "last operations:" in text
    assert re.search(r"\[0(-|, )2\] .*hanging.py:\d+ <module>", text), text  # one tree for all ranks
    dumps = {path.name: pickle.loads(path.read_bytes()) for path in tmp_path.glob("*/hang-1/flight_recorder/rank_*")}
    assert sorted(dumps) == ["rank_0", "rank_1", "rank_2"]
    states = [one["state"] for one in dumps["rank_0"]["entries"]]
    assert states.count("scheduled") == 1 and states.count("completed") == len(states) - 1 > 0


def test_a_wrong_shape_is_an_error_on_all_ranks_and_the_launcher_names_the_rank(tmp_path: Path) -> None:
    words = command(3, "shape", 1, tmp_path)
    done = subprocess.run(words, env=environment(tmp_path), capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and not list(tmp_path.glob("*/hang-*")), done.stderr
    told = "farandole: other shape: rank 1 submitted allreduce 'allreduce.b' float32 [5, 3]; ranks 0, 2 submitted "
    assert told in done.stderr, done.stderr


def test_a_job_without_faults_gets_no_verdict(tmp_path: Path) -> None:
    words = command(2, "none", 0, tmp_path)
    done = subprocess.run(words, env=environment(tmp_path, 2.0), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "hang" not in done.stderr and not list(tmp_path.glob("*/hang-*")), done.stderr


@contextmanager
def running(fault: str, folder: Path, note: float, *options: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A job of two ranks that runs, and the file with what it prints."""
    printed = folder / "printed"
    with open(printed, "w") as out:
        words = command(2, fault, 1, folder, *options)
        job = subprocess.Popen(words, env=environment(folder, note), stdout=out, stderr=out, text=True)
        try:
            yield job, printed
        finally:
            job.terminate()
            job.wait(60)


def ask(question: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    asked = [sys.executable, "-m", "farandole", question, *words]
    return subprocess.run(asked, env=environment(folder), capture_output=True, text=True, timeout=60)


def test_a_running_job_says_what_it_waits_for_when_it_is_asked(tmp_path: Path) -> None:
    with running("sleeps", tmp_path, 100.0) as (job, printed):
        until(lambda: "waits for rank 1" in ask("why", tmp_path).stdout, 60, printed.read_text)
        why = ask("why", tmp_path, str(job.pid)).stdout
        assert "rank 0 waits for rank 1 in allreduce 'allreduce.a' float32 [4, 3]" in why and "it sleeps" in why, why
        stacks = ask("stacks", tmp_path).stdout
        assert re.search(r"\[0\] .*hanging.py:\d+ main.*\n.*farandole/operations", stacks), stacks
        assert str(job.pid) in ask("why", tmp_path, "--list").stdout
        wrong = ask("why", tmp_path, "1")
        assert wrong.returncode == 2 and str(job.pid) in wrong.stderr
        assert "waits for" not in printed.read_text()  # nothing in the job's own output
        job.send_signal(signal.SIGQUIT)
        until(lambda: "main threads:" in printed.read_text(), 30, printed.read_text)
        assert "rank 0 waits for rank 1" in printed.read_text() and job.poll() is None
    assert not (tmp_path / "state" / "farandole").exists()


def test_the_end_of_a_hang_is_reported_and_the_job_continues(tmp_path: Path) -> None:
    with running("stopped", tmp_path, 0.5) as (_, printed):
        until(lambda: "does not run" in printed.read_text(), 60, printed.read_text)
        stopped = re.search(r"rank 1 \(process (\d+) on", printed.read_text())
        assert stopped is not None
        os.kill(int(stopped[1]), signal.SIGCONT)
        until(lambda: "hang: over, 'allreduce.a' went on after" in printed.read_text(), 30, printed.read_text)


def test_a_killed_rank_leaves_its_last_operations(tmp_path: Path) -> None:
    with running("sleeps", tmp_path, 100.0) as (job, printed):
        until(lambda: "waits for rank 1" in ask("why", tmp_path).stdout, 60, printed.read_text)
        pid = re.search(r"rank 1 \(process (\d+) on", ask("why", tmp_path).stdout)
        assert pid is not None
        os.kill(int(pid[1]), signal.SIGKILL)
        assert job.wait(60) == 128 + signal.SIGKILL
    last = "rank 1 had ended 18 operations; the last one was allreduce 'allreduce.c' float32 [4, 3]"
    assert last in printed.read_text(), printed.read_text()


# Nightly: as often as a promise about 100 needs.


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("fault", KINDS)
def test_nearly_all_of_many_faults_are_attributed(fault: str, tmp_path: Path) -> None:
    wrong: list[str] = []
    repeats = max(1, REPEATS // 10) if fault in WITH_TORCH else REPEATS
    for turn, (size, rank) in zip(range(repeats), itertools.cycle([(3, 0), (3, 1), (3, 2), (2, 1)]), strict=False):
        folder = tmp_path / str(turn)
        folder.mkdir()
        try:
            check(*hang(size, fault, rank, folder), fault, size, rank)
        except AssertionError as error:
            wrong.append(f"turn {turn}, rank {rank} of {size}: {str(error)[:2000]}")
    for left in Path(tempfile.gettempdir()).glob("pymp-*"):  # of killed ranks with workers of a loader
        shutil.rmtree(left)
    print(f"{fault}: {repeats - len(wrong)} of {repeats} attributed")
    assert len(wrong) <= repeats // 100, "\n".join(wrong)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_slow_rank_is_named_each_time(tmp_path: Path) -> None:
    for turn in range(max(1, REPEATS // 10)):
        rank = turn % 3
        folder = tmp_path / str(turn)
        folder.mkdir()
        words = command(3, "slow", rank, folder)
        done = subprocess.run(words, env=environment(folder, 5.0), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and "hang" not in done.stderr, done.stderr
        assert set(re.findall(r"rank (\d) on localhost is slow", done.stderr)) == {str(rank)}, done.stderr


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_jobs_without_faults_get_no_verdict(tmp_path: Path) -> None:
    for turn in range(REPEATS):
        folder = tmp_path / str(turn)
        folder.mkdir()
        test_a_job_without_faults_gets_no_verdict(folder)
