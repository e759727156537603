# The command line, as users type it.
# Touches processes.
from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from meeting import until

from farandole.launch import cli, local
from farandole.version import package_version

pytestmark = pytest.mark.ranks


def farandole(*words: str) -> local.Job:
    """The command in a process of its own."""
    return local.start([sys.executable, "-m", "farandole", *words], 1)


def test_run_marks_lines_and_tells_who_failed() -> None:
    code = "import os, sys; print('hello'); sys.exit(4 if os.environ['HOROVOD_RANK'] == '1' else 0)"
    with farandole("run", "-np", "2", sys.executable, "-c", code) as job:
        assert job.wait(60) == 4
        assert "[1]<stdout>:hello\n" in job.stdout(0)
        assert "rank 1 (process" in job.stderr(0) and "failed first: exit code 4" in job.stderr(0)


def test_run_raw_and_with_options_of_the_command() -> None:
    with farandole(
        "run", "-np", "1", "--raw", "--start-timeout", "7", "sh", "-c", "echo $FARANDOLE_START_TIMEOUT $0", "--np"
    ) as job:
        assert job.wait(60) == 0 and job.stdout(0) == "7.0 --np\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_the_job(number: int, code: int) -> None:
    with farandole("run", "-np", "2", "sh", "-c", "echo $$; sleep 60") as job:
        until(lambda: job.stdout(0).count("\n") == 2)
        pids = [int(line.partition(":")[2]) for line in job.stdout(0).splitlines()]
        job.kill(0, number)
        assert job.wait(10) == code
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        assert "failed first" not in job.stderr(0)


def test_output_nobody_reads_ends_the_job() -> None:
    with local.start(["sh", "-c", f"{sys.executable} -m farandole run -np 1 yes | head -1"], 1) as job:
        assert job.wait(30) == 0 and job.stdout(0) == "[0]<stdout>:y\n"


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ([], 2, "usage"),
        (["--help"], 0, "usage"),
        (["--version"], 0, f"farandole {package_version()}"),
        (["rnu"], 2, "did you mean `run`?"),
        (["run", "-np", "2", "train.py"], 127, "did you mean `python train.py`?"),
        (["run", "-np", "2", "no-such-program"], 127, "no such program"),
        (["run", "-np", "0", "true"], 2, "at least one rank"),
        (["run", "-np", "2"], 2, "no command"),
        (["run", "-np", "two", "true"], 2, "invalid int"),
        (["run", "true"], 2, "-np"),
        (["run", "-np", "2", "--unknown", "true"], 2, "unrecognized arguments: --unknown"),
    ],
)
def test_what_is_said_about_bad_lines(
    words: list[str], code: int, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        result = cli.main(words)
    except SystemExit as end:
        assert isinstance(end.code, int)
        result = end.code
    out, err = capfd.readouterr()
    assert result == code and text in out + err, out + err


def test_tools_get_their_words(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--help"]) == 0
    assert "allreduce" in capfd.readouterr().out
