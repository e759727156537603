# The command line, as users type it.
# Touches processes.
from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import secrets
import shlex
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import Any

import pytest
from local_ranks import marked
from waiting import in_time, until

from farandole.base.version import package_version
from farandole.launch import cli, local

pytestmark = pytest.mark.ranks
PYTHON = shlex.quote(sys.executable)  # as a shell reads it
LASTS = "while :; do sleep 0.05; done"  # sleep: in slices, since a shell runs its traps between them


def until_there(path: Path) -> str:
    """A shell waits for this file."""
    return f"while [ ! -e {shlex.quote(str(path))} ]; do sleep 0.05; done"  # sleep: between two looks


def farandole(*arguments: str, **env: str) -> local.Job:
    """The command in a separate process."""
    return local.start([sys.executable, "-m", "farandole", *arguments], 1, env=env)


def test_run_prefixes_lines_and_names_the_failed_rank_with_its_last_output() -> None:
    code = "import os, sys; print('hello'); sys.exit('what\\na day' if os.environ['HOROVOD_RANK'] == '1' else 0)"
    with farandole("run", "-np", "2", sys.executable, "-c", code) as job:
        assert job.wait(60) == 1
        assert "[1]<stdout>:hello\n" in job.stdout(0)
        output = job.stderr(0)
        assert "rank 1 (process" in output and "failed first: exit code 1" in output
        assert output.index("rank 1: last lines -----\nwhat\na day\n") < output.index("failed first")


def test_run_raw_and_with_options_of_the_command() -> None:
    arguments = ("run", "-np", "1", "--raw", "--start-timeout", "7", "--fusion-threshold-mb", "2")
    with farandole(*arguments, "sh", "-c", "echo $FARANDOLE_START_TIMEOUT $HOROVOD_FUSION_THRESHOLD $0", "--np") as job:
        assert job.wait(60) == 0 and job.stdout(0) == f"7 {2 << 20} --np\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_are_passed_on_and_end_the_job(number: signal.Signals, code: int) -> None:
    script = f"trap 'echo got {number.name}; exit 3' {number.name[3:]}; echo $$; {LASTS}"
    with farandole("run", "-np", "2", "sh", "-c", script) as job:
        until(lambda: job.stdout(0).count("\n") == 2)
        pids = [int(line.partition(":")[2]) for line in job.stdout(0).splitlines()]
        job.kill(0, number)
        assert job.wait(60) == code
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        assert job.stdout(0).count(f"got {number.name}") == 2
        assert "failed first" not in job.stderr(0) and "once more kills" in job.stderr(0)


def test_a_second_signal_kills() -> None:
    with farandole("run", "-np", "2", "sh", "-c", f"trap : INT; echo $$; {LASTS}") as job:
        until(lambda: job.stdout(0).count("\n") == 2)
        pids = [int(line.partition(":")[2]) for line in job.stdout(0).splitlines()]
        job.kill(0, signal.SIGINT)
        until(lambda: "once more kills" in job.stderr(0))
        job.kill(0, signal.SIGINT)
        assert job.wait(60) == 130
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_ranks_that_do_not_end_in_their_grace_are_killed() -> None:
    with farandole("run", "-np", "1", "--grace", "0.2", "sh", "-c", f"trap : TERM; echo up; {LASTS}") as job:
        until(lambda: "up" in job.stdout(0))
        job.kill(0, signal.SIGTERM)
        assert job.wait(60) == 143


def test_a_terminal_has_colours_and_a_status_line_that_goes_away(tmp_path: Path) -> None:
    script = f"echo one; {until_there(tmp_path / 'go')}; echo two"
    arguments = [sys.executable, "-m", "farandole", "run", "-np", "2", "sh", "-c", script]
    child, terminal = pty.fork()
    if child == 0:
        os.environ["TERM"] = "xterm"
        os.environ.pop("NO_COLOR", None)
        os.execv(arguments[0], arguments)
    printed = b""
    with os.fdopen(terminal, "rb", buffering=0) as screen, contextlib.suppress(OSError):  # EIO at the end
        while part := screen.read(4096):
            printed += part
            if b"2 of 2 ranks run" in printed:
                (tmp_path / "go").touch()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, printed
    assert b"\x1b[36m[0]<stdout>:\x1b[0mone\r\n" in printed and b"\x1b[33m[1]<stdout>:\x1b[0mtwo\r\n" in printed, (
        printed
    )
    assert printed.endswith(b"\r\x1b[K"), printed


def test_an_agent_that_is_asked_to_end_ends_the_job() -> None:
    with farandole("run", "-np", "2", "sh", "-c", f"trap 'echo bye; exit 0' TERM; echo up; {LASTS}") as job:
        until(lambda: job.stdout(0).count("up") == 2)
        [agent] = [
            int(entry) for entry in filter(str.isdigit, os.listdir("/proc")) if _parent_of_ranks(entry, job.pids[0])
        ]
        os.kill(agent, signal.SIGTERM)
        assert job.wait(60) == 143 and job.stdout(0).count("bye") == 2
        assert "got SIGTERM" in job.stderr(0)


def _parent_of_ranks(pid: str, launcher: int) -> bool:
    """Whether this is the agent below a launcher."""
    try:
        name, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rsplit(")", 1)
        guard = rest.split()[1]
        above = Path(f"/proc/{guard}/stat").read_text().rpartition(")")[2].split()[1]
        return name == "farandole-agent" and int(above) == launcher
    except OSError:
        return False


def test_output_nobody_reads_ends_the_job() -> None:
    with local.start(["sh", "-c", f"{PYTHON} -m farandole run -np 1 yes | head -1"], 1) as job:
        assert job.wait(60) == 0 and job.stdout(0) == "[0]<stdout>:y\n"


def full(pipe: Any) -> bool:
    """Whether nothing more goes into a pipe whose end we hold."""
    limit = fcntl.fcntl(pipe.fileno(), fcntl.F_GETPIPE_SZ)
    return bool(struct.unpack("i", fcntl.ioctl(pipe.fileno(), termios.FIONREAD, bytes(4)))[0] > limit - 8192)


@pytest.mark.parametrize("errors", [subprocess.DEVNULL, subprocess.STDOUT])
def test_a_launcher_whose_output_is_stuck_ends_when_asked_to(errors: int) -> None:
    mark = secrets.token_hex(8)
    command = [sys.executable, "-m", "farandole", "run", "-np", "2", "--grace", "2", "yes"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=errors, env={**os.environ, "TEST_MARK": mark}
    ) as launcher:
        assert launcher.stdout is not None
        pipe = launcher.stdout
        until(lambda: full(pipe))
        assert len(marked(mark)) >= 5, "launcher, guard, agent and two ranks"
        began = time.monotonic()
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(60) == 143
        in_time(time.monotonic() - began, 6.0, "the end of a launcher with a grace of 2 s")
        assert not marked(mark)


def test_output_that_is_read_slowly_comes_whole() -> None:
    lines = 300_000
    with subprocess.Popen(
        [sys.executable, "-m", "farandole", "run", "-np", "1", "--raw", "seq", str(lines)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as launcher:
        assert launcher.stdout is not None
        first = launcher.stdout.read(10)
        until(lambda: full(launcher.stdout))  # so that seq and the agent have to wait
        assert (first + launcher.stdout.read()).split() == [b"%d" % number for number in range(1, lines + 1)]
        assert launcher.wait(60) == 0


def test_signals_that_were_ignored_before_stay_ignored(tmp_path: Path) -> None:
    """nohup ignores SIGHUP, and the shell of a script ignores SIGINT for programs in the background."""
    script = f"echo up; {until_there(tmp_path / 'go')}; echo done"
    start = f'trap "" HUP INT; exec {PYTHON} -m farandole run -np 1 sh -c "$0"'
    with local.start(["sh", "-c", start, script], 1) as job:
        until(lambda: "up" in job.stdout(0))
        job.kill(0, signal.SIGHUP)
        job.kill(0, signal.SIGINT)
        (tmp_path / "go").touch()
        assert job.wait(60) == 0 and "done" in job.stdout(0)


@pytest.mark.parametrize(("closed", "out", "err"), [(">&-", "", "oh"), ("2>&-", "hi", ""), ("<&- >&- 2>&-", "", "")])
def test_closed_standard_streams_are_no_error(closed: str, out: str, err: str) -> None:
    run = f"{PYTHON} -m farandole run -np 1 --threads-per-rank 1 --raw sh -c 'echo hi; echo oh >&2' {closed}"
    with local.start(["sh", "-c", run], 1) as job:
        assert job.wait(60) == 0
        assert (job.stdout(0).strip(), job.stderr(0).strip()) == (out, err)


def test_a_working_directory_that_is_gone() -> None:
    path = shlex.quote(tempfile.mkdtemp())
    with local.start(["sh", "-c", f"cd {path}; rmdir {path}; exec {PYTHON} -m farandole run -np 1 true"], 1) as job:
        assert job.wait(60) == 1
        assert (
            job.stderr(0) == "farandole: the working directory has been removed; cd to one that exists [no-directory]\n"
        )


def test_a_directory_of_temporary_files_with_a_comma() -> None:
    code = "import farandole as hvd, os; hvd.init(); print(hvd.size(), os.environ['FARANDOLE_PRIVATE_DIRECTORY'])"
    with tempfile.TemporaryDirectory(prefix="a,b") as path:
        with farandole("run", "-np", "2", sys.executable, "-c", code, TMPDIR=path) as job:
            assert job.wait(60) == 0, job.stderr(0)
            assert job.stdout(0).count(f">:2 {path}/farandole-") == 2


def test_a_full_disk_is_reported_and_ends_the_job(tmp_path: Path) -> None:
    path = tmp_path / "out" / "rank.0"
    path.mkdir(parents=True)
    (path / "stdout").symlink_to("/dev/full")
    with farandole(
        "run", "-np", "1", "--output-filename", str(tmp_path / "out"), "sh", "-c", "echo x; sleep 60"
    ) as job:
        assert job.wait(60) == 1
        assert "cannot write the output of rank 0" in job.stderr(0) and "No space left" in job.stderr(0)


def test_no_ssh_on_this_host() -> None:
    with farandole("run", "-np", "1", "-H", "far.example:1", "true", PATH="/nowhere") as job:
        assert job.wait(60) == 127 and "cannot start ssh: No such file" in job.stderr(0)


def test_verbose_prints_the_processes() -> None:
    with farandole("run", "-np", "1", "--verbose", "sh", "-c", "echo $$") as job:
        assert job.wait(60) == 0
        assert f"rank 0 is process {job.stdout(0).partition(':')[2].strip()} on localhost" in job.stderr(0)


def test_files_of_each_rank_and_the_folder_of_a_run(tmp_path: Path) -> None:
    arguments = ("run", "-np", "2", "--output-filename", str(tmp_path / "out"), "--log-dir", str(tmp_path / "log"))
    with farandole(*arguments, "--timestamps", "sh", "-c", "echo $RANK $FARANDOLE_TIMELINE; echo e >&2") as job:
        assert job.wait(60) == 0
        assert ":" in job.stdout(0).partition("[")[0], "a time in front"
    [run] = (tmp_path / "log").iterdir()
    assert (tmp_path / "out/rank.1/stdout").read_text() == f"1 {run}/timeline.json\n"
    assert (tmp_path / "out/rank.1/stderr").read_text() == "e\n" == (run / "rank.0/stderr").read_text()
    assert "fusion_threshold" in (run / "settings.txt").read_text()
    assert f'"farandole": "{package_version()}"' in (run / "run.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ([], 2, "usage"),
        (["--help"], 0, "usage"),
        (["--version"], 0, f"farandole {package_version()}"),
        (["rnu"], 2, "did you mean `run`?"),
        (["run", "-v"], 0, f"farandole {package_version()}"),
        (["run", "--help"], 0, "ranks that come and go:"),
        (["run", "--help-all"], 0, "--fusion-threshold-mb"),
        (["run", "--check-build"], 0, "[X] Gloo"),
        (["run", "-np", "2", "train.py"], 127, "did you mean `python train.py`?"),
        (["run", "-np", "2", "no-such-program"], 127, "no such program"),
        (["run", "-np", "2", "pyhton", "train.py"], 127, "did you mean python?"),
        (["run", "-np", "2", "python", "no-such-script.py"], 2, "there is no file no-such-script.py (looked from "),
        (["run", "-np", "0", "true"], 2, "at least one rank"),
        (["run", "-np", "2"], 2, "no command"),
        (["run", "-np", "two", "true"], 2, "-np two: expected a whole number"),
        (["run", "-np"], 2, "-np needs a value"),
        (["run", "true"], 2, "-np"),
        (["run", "-np", "2", "--unknown", "true"], 2, "unknown option --unknown"),
        (["run", "-np", "2", "--time-line-filename", "x", "true"], 2, "did you mean --timeline-filename?"),
        (["run", "-np", "8", "-H", "localhost:4", "true"], 2, "only 4 slots (localhost:4)"),
        (["run", "-np", "1", "-H", "a:b", "true"], 2, "not a number of slots"),
        (["run", "-np", "1", "-H", "-oProxyCommand=x", "true"], 2, "is not a host name"),
        (["run", "-np", "1", "-H", "a,,b", "true"], 2, "an entry is empty"),
        (["run", "-np", "1", "--hostfile", "/no/such/file", "true"], 2, "cannot read --hostfile"),
        (["run", "-np", "1", "--config-file", "/no/such/file", "true"], 2, "cannot read --config-file"),
        (["run", "-np", "1", "-H", "a", "--hostfile", "b", "true"], 2, "exclude each other"),
        (["run", "-np", "1", "--gloo", "--mpi", "true"], 2, "exclude each other"),
        (["run", "-np", "2", "--min-np", "3", "true"], 2, "--min-np 3: expected a number from 1 to -np 2"),
        (["run", "-np", "2", "--reset-limit", "3", "true"], 2, "--reset-limit is for elastic jobs"),
        (["run", "-np", "2", "--min-np", "1", "--mpi", "true"], 2, "leave --mpi and --jsrun out"),
        (["run", "-np", "2", "--host-discovery-script", "s", "-H", "a:2", "true"], 2, "exclude each other"),
        (
            ["run", "-np", "2", "--host-discovery-script", "/no/such", "true"],
            1,
            "--host-discovery-script /no/such: No such",
        ),
        (["run", "-np", "2", "--output-filename", "/proc/nowhere", "true"], 2, "cannot write to /proc/nowhere"),
        (["run", "-np", "2", "--cache-capacity", "-1", "true"], 2, "--cache-capacity=-1"),
        (["run", "-np", "2", "--threads-per-rank", "0", "true"], 2, "at least 1"),
        (["run", "-np", "2", "--grace", "inf", "true"], 2, "--grace inf: expected a number"),
        (["run", "-np", "2", "--grace=nan", "true"], 2, "--grace nan: expected a number"),
        (["run", "-np", "2", "--start-timeout", "nan", "true"], 2, "--start-timeout=nan: expected"),
        (["run", "-np", "2", "--start-timeout", "inf", "true"], 2, "--start-timeout=inf: expected"),
    ],
)
def test_errors_of_malformed_lines(
    arguments: list[str], code: int, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    result = cli.main(arguments)
    out, err = capfd.readouterr()
    assert result == code and text in out + err, out + err


def test_dry_run_and_print_config(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["run", "-np", "3", "-H", "localhost:2,far.example:2", "--dry-run", "python", "x.py"]) == 0
    page = capfd.readouterr().out
    assert "3 ranks of: python x.py" in page and "   2  far.example: local rank 0 of 1, cross rank 1 of 2" in page
    assert "BatchMode=yes" in page and "  WORLD_SIZE=3" in page
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "3")
    assert cli.main(["run", "-np", "1", "--cache-capacity", "5", "--print-config"]) == 0
    lines = {line.split()[0]: line.split(maxsplit=2)[1:] for line in capfd.readouterr().out.splitlines()}
    assert lines["cycle_time"] == ["3", "variable HOROVOD_CYCLE_TIME"]
    assert lines["cache_capacity"] == ["5", "flag --cache-capacity"]
    assert lines["links"] == ["auto", "default"]


def test_tools_get_their_arguments(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--help"]) == 0
    assert "allreduce" in capfd.readouterr().out


def test_the_summary_at_the_end(tmp_path: Path) -> None:
    code = "import farandole as hvd; hvd.init(); hvd.barrier()"
    found = tmp_path / "job.json"
    with farandole("run", "-np", "2", "--json", str(found), sys.executable, "-c", code) as job:
        assert job.wait(60) == 0, job.stderr(0)
        said = job.stderr(0)
    assert re.search(r"^farandole: 2 ranks ended well after [\d.]+ s; peak memory \d+ MB \(rank [01]\)$", said, re.M), (
        said
    )
    facts = json.loads(found.read_text())
    assert facts["exit_code"] == 0 and [one["exit_code"] for one in facts["endings"]] == [0, 0]
    assert all(one["peak_memory_mb"] > 1 and one["seconds_in_job"] > 0 for one in facts["endings"])
    with farandole("run", "-np", "2", "--quiet", sys.executable, "-c", code) as job:
        assert job.wait(60) == 0 and "farandole: " not in job.stderr(0), job.stderr(0)
