# `farandole config`: questions on a terminal, wrong answers, the file that it writes, and that `run` reads this file.
# Starts the command on a pseudo-terminal; it starts two ranks, as doctor does.
from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from farandole.launch import cli, run
from farandole.launch.options import Usage, parse
from farandole.tools import config
from farandole.tools.config import Answers

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120.0


def on_a_terminal(folder: Path, answers: list[str]) -> tuple[int, str]:
    """Runs the command, gives the next answer to each question. Returns its exit code and what it showed."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TERM": "dumb"}
    command = [sys.executable, "-m", "farandole", "config"]
    with subprocess.Popen(command, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown, asked, until = "", 0, time.monotonic() + LIMIT_S
        try:
            while time.monotonic() < until:
                if not select.select([ours], [], [], 1.0)[0]:
                    continue
                try:
                    shown += os.read(ours, 4096).decode()
                except OSError:  # the command has ended
                    break
                if shown.count("] ") > asked and shown.endswith("] ") and answers:
                    asked = shown.count("] ")
                    os.write(ours, answers.pop(0).encode() + b"\n")
        finally:
            os.close(ours)
            if process.poll() is None and time.monotonic() >= until:
                process.kill()
    return process.returncode, shown


@pytest.mark.ranks
@pytest.mark.timeout(150)
def test_the_file_that_it_writes_starts_an_elastic_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, shown = on_a_terminal(tmp_path, ["", "none", "3", "", "yes", "4", "2"])
    assert code == 0, shown
    assert "expected a number from 1 to 4096" in shown and "expected a number from 1 to 3, the number of ranks" in shown
    assert " tests passed" in shown and "farandole run --config-file farandole.yaml python train.py" in shown
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "--config-file", "farandole.yaml", "--dry-run", "true"]) == 0
    assert "3 ranks to start with, at least 2, at most" in capfd.readouterr().out


def scripted(*answers: str) -> Answers:
    """Answers questions in this order."""
    left: Iterator[str] = iter(answers)
    return Answers(lambda _question: next(left))


def test_wrong_answers_are_asked_again(capsys: pytest.CaptureFixture[str]) -> None:
    job = scripted("a:x", "a:2,b:2", "5", "", "srun", "mpirun").job()
    assert job.text().partition("\n")[2] == "job:\n  np: 4\n  hosts: a:2,b:2\ncontroller: mpi\n"
    said = capsys.readouterr().out
    for wrong in (
        "'x' is not a number of slots",
        "from 1 to 4, because the hosts have so many slots",
        "expected one of",
    ):
        assert wrong in said


def test_without_a_terminal_it_shows_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(os.devnull) as nobody:
        monkeypatch.setattr(sys, "stdin", nobody)
        assert config.main([]) == 2
    said = capsys.readouterr().err
    assert "the standard input is no terminal" in said and "hosts: host1:2,host2:2" in said
    assert config.main(["--np", "2"]) == 2 and "at most the name of a file" in capsys.readouterr().err


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("job: {np: 4, hosts: 'a:2,b:2', min_np: 2, threads_per_rank: 3}\n")
    options = parse(["--config-file", str(file), "true"], {})
    assert (options.np, options.hosts, options.min_np, options.threads) == (4, "a:2,b:2", 2, 3)
    run.check(options)
    (tmp_path / "hosts").write_text("c slots=8\n")
    options = parse(["--config-file", str(file), "-np", "3", "--hostfile", str(tmp_path / "hosts"), "true"], {})
    assert (options.np, options.hosts) == (3, None)
    assert [host.name for host in run.chosen_hosts(options)] == ["c"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("job: {min_nq: 2}", "unknown setting in job: min_nq; did you mean min_np?"),
        ("job: {np: two}", "job.np: two: expected a whole number"),
        ("job: {np: [2]}", "job.np: [2]: expected a number"),
        ("jobs: {np: 2}", "unknown section: jobs; did you mean job?"),
        ("job: 2", "job: expected settings below it"),
    ],
)
def test_mistakes_in_the_file(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(Usage) as caught:
        parse(["--config-file", str(file), "true"], {})
    assert said in str(caught.value)
