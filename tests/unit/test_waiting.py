# How tests handle time and the shell that started them: events, promised times, another try on a busy machine.
# Touches the clocks; starts pytest with tests/conftest.py on small tests that this file writes.
from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import waiting
from waiting import Moment, Spent, TooSlow, again_when_busy, in_time, until

ROOT = Path(__file__).resolve().parents[2]


def test_results_are_returned_and_missing_ones_are_an_error() -> None:
    numbers = itertools.count()
    assert until(lambda: next(numbers) > 3 and "here") == "here"
    with pytest.raises(TimeoutError, match=r"did not come about within 0.02 s: still nothing"):
        until(lambda: 0, 0.02, "still nothing")
    with pytest.raises(TimeoutError, match="did not come about before the end: of 1"):
        until(lambda: 0, what=lambda: "of 1", alive=lambda: False)
    last = iter([False, True])
    assert until(lambda: next(last), alive=lambda: False), "it came just before the end"


def test_cpu_time_is_counted_by_its_user() -> None:
    before = Moment.now()
    spin = "import time\nwhile time.process_time() < 0.5: pass"
    with subprocess.Popen([sys.executable, "-c", spin + "\nprint(flush=True); input()"], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None and child.stdout.readline()
        assert before.since().own >= 0.4, "of a child that lives"
        child.communicate(b"\n")
    assert before.since().own >= 0.4, "of a child that has ended"


@pytest.mark.parametrize(
    ("spent", "busy"),
    [
        (Spent(10.0, own=20.0, others=0.5, stolen=0.1, cores=2), False),
        (Spent(10.0, own=2.0, others=6.0, stolen=0.0, cores=2), True),
        (Spent(10.0, own=2.0, others=0.0, stolen=1.5, cores=2), True),
    ],
)
def test_the_busy_share_of_a_machine_is_what_other_processes_used(spent: Spent, busy: bool) -> None:
    assert spent.busy is busy
    assert f"{spent.own:.2f} CPU s in the test's processes" in str(spent)


def tries_of(monkeypatch: pytest.MonkeyPatch, busy: bool, slow: int, seconds: float = 60.0, **fixtures: object) -> int:
    """How often a test starts if its first `slow` tries are too slow."""
    monkeypatch.setattr(waiting, "BUSY", -1.0 if busy else 1e9)
    monkeypatch.setattr(waiting, "STOLEN", 1e9)
    monkeypatch.setattr(waiting, "repeated", [])
    seen: list[object] = []

    def test(**given: object) -> None:
        seen.append(given.get("tmp_path"))
        in_time(2.0 if len(seen) <= slow else 0.5, 1.0, "this")

    try:
        again_when_busy(test, seconds)(**fixtures)
    except TooSlow as error:
        assert len(seen) <= slow and "this took 2.000 s; the limit is 1 s" in str(error)
    else:
        assert len(seen) == slow + 1
    assert len(waiting.repeated) == len(seen) - 1
    assert len(set(seen)) == (len(seen) if fixtures else 1)
    return len(seen)


def test_a_test_begins_again_where_it_was_too_slow_on_a_busy_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert tries_of(monkeypatch, busy=True, slow=0) == 1
    assert tries_of(monkeypatch, busy=True, slow=2, tmp_path=tmp_path) == 3
    assert tries_of(monkeypatch, busy=True, slow=9) == waiting.TRIES
    assert tries_of(monkeypatch, busy=False, slow=1) == 1
    assert tries_of(monkeypatch, busy=True, slow=1, seconds=0.0) == 1


TESTS = """
import os, signal, subprocess, sys
import pytest, waiting

def test_a_test_that_passes_in_its_second_try(monkeypatch):
    monkeypatch.setattr(waiting, "BUSY", -1.0)
    waiting.in_time(2.0 - len(waiting.repeated), 1.0, "the first try")

@pytest.mark.timeout(0.5)
def test_a_busy_machine_gets_more_time(monkeypatch):
    monkeypatch.setattr(waiting, "BUSY", -1.0)
    waiting.until(lambda: waiting.repeated)

def test_that_fails():
    assert not "this"

def test_ctrl_c():
    code = "import signal; print('up', flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=-1, stderr=-1) as child:
        assert child.stdout.readline() == b"up\\n"
        child.send_signal(signal.SIGINT)
        assert b"KeyboardInterrupt" in child.communicate(timeout=30)[1]

def test_of_no_job():
    found = [name for name in os.environ if name.startswith(("SLURM_", "HOROVOD_")) or name == "RANK"]
    assert found == [] and os.environ["MINE"] == "kept"
"""


def background(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """pytest with tests/conftest.py, as a shell starts it in the background of a rank of some job."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", "-c", os.devnull]
    script = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
    path = os.pathsep.join(str(ROOT / part) for part in ("tests", "src"))
    job = {"PYTHONPATH": path, "SLURM_PROCID": "1", "HOROVOD_RANK": "1", "RANK": "1", "MINE": "kept"}
    environment = {**os.environ, **job, "TMPDIR": str(folder)}  # a run that is ended leaves what it had there
    command += ["-o", "timeout_method=thread", *options, str(folder)]
    return subprocess.run([*script, *command], env=environment, cwd=folder, capture_output=True, text=True)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=["one process", "a worker"])
def test_a_run_in_the_background_of_a_shell(tmp_path: Path, workers: list[str]) -> None:
    """Ctrl-C is ignored there, and variables of the job are set; a failure says how busy the machine was."""
    (tmp_path / "test_it.py").write_text(TESTS)
    done = background(tmp_path, "-o", "timeout=100", *workers)
    assert "1 failed, 4 passed" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("time and processors") == 1 and "CPU s in the test's processes" in done.stdout
    assert "tried again or given more time, because the machine was busy: " in done.stdout
    assert "test_a_test_that_passes_in_its_second_try: the first try took 2.000 s" in done.stdout
    assert "test_a_busy_machine_gets_more_time: not done after 0.5 s" in done.stdout


def test_a_test_that_hangs_ends_the_run_with_evidence(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import signal, waiting\ndef test_it():\n    waiting.BUSY = waiting.STOLEN = 1e9\n    signal.pause()\n"
    )
    done = background(tmp_path, "-o", "timeout=1")
    assert len(list(tmp_path.glob("farandole-tests-*"))) == 1, "what it had is left, and the next run removes it"
    assert done.returncode == 1 and "test_it.py::test_it: not done after 1 s; " in done.stdout, done.stdout
    assert "CPU s in the test's processes" in done.stdout and "signal.pause()" in done.stdout
    (tmp_path / "test_it.py").write_text("def test_it():\n    pass\n")
    assert background(tmp_path).returncode == 0 and not list(tmp_path.glob("farandole-tests-*"))
