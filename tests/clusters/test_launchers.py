# Real launchers on this host: Open MPI, MPICH and torchrun start the demo, and simultaneous jobs stay separate.
# Touches processes; temporary files in the tests' own directory.
"""Tests of launchers that are not installed are skipped; `make test` installs it on Debian."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from waiting import in_time, until

from farandole.rendezvous import sockets

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = str(ROOT / "tests" / "clusters" / "program.py")
DIGITS = [str(ROOT / "examples" / "torch_digits.py"), "--epochs", "1"]
PATH = f"{os.environ['PATH']}:/usr/bin"
LAUNCHERS = {
    "openmpi": ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np"],
    "mpich": ["mpiexec.hydra", "-n"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node"],
}
PACKAGES = {"openmpi": "openmpi-bin", "mpich": "mpich"}
MPIS = sorted(PACKAGES)


def command(launcher: str, ranks: int, *script: str) -> list[str]:
    """The launcher's command line for a Python script; skips the test where it is not installed."""
    words = [*LAUNCHERS[launcher], str(ranks)]
    if launcher in PACKAGES:
        if shutil.which(words[0], path=PATH) is None:
            pytest.skip(f"{words[0]} is not installed (Debian's package {PACKAGES[launcher]})")
        words.append(sys.executable)
    return [*words, *script]


@contextlib.contextmanager
def started(words: Sequence[str], **more: str) -> Iterator[subprocess.Popen[str]]:
    """A job in its own group of processes; all of it is gone at the end."""
    environment = {**os.environ, "PATH": PATH, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **more}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, "text": True}
    process = subprocess.Popen(words, env=environment, start_new_session=True, **pipes)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def finish(process: subprocess.Popen[str], timeout: float = 90.0) -> str:
    """What a job that ends well has printed."""
    output, complained = process.communicate(timeout=timeout)
    assert process.returncode == 0, output + complained
    return output


def reports(text: str) -> list[dict[str, Any]]:
    """One per rank and round. Launchers may glue the lines of two ranks together."""
    decoder, found, place = json.JSONDecoder(), [], 0
    while (place := text.find("{", place)) >= 0:
        one, place = decoder.raw_decode(text, place)
        found.append(one)
    return found


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of temporary files for the jobs alone: launchers leave things of their own there."""
    with tempfile.TemporaryDirectory() as path:
        monkeypatch.setenv("TMPDIR", path)
        yield Path(path)
        monkeypatch.undo()


def left() -> list[str]:
    """What is left of ours in the directory of temporary files."""
    return [name for name in os.listdir(os.environ["TMPDIR"]) if name.startswith("farandole-")]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_demo_runs_as_it_is(launcher: str) -> None:
    words = command(launcher, 2, *DIGITS)
    held, port = sockets.hold_port()
    if launcher == "torchrun":  # its own choice is one number, and somebody else may run it here
        words[words.index("--nproc_per_node") : 0] = ["--master_port", str(port)]
    with held, started(words, FARANDOLE_LOG_LEVEL="info") as job:
        output, complained = job.communicate(timeout=100)
    assert job.returncode == 0, output + complained
    assert "accuracy" in output and output.count("accuracy") == 1, "two ranks, one of which prints"
    assert complained.count("started this process: rank 0 of 2") == 1, complained
    assert not left()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_only_rank_0_warns_of_settings_without_effect(launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import farandole\nfarandole.init()\nfarandole.barrier()\n")
    words = command(launcher, 3, str(script))
    held, port = sockets.hold_port()
    if launcher == "torchrun":
        words[words.index("--nproc_per_node") : 0] = ["--master_port", str(port)]
    with held, started(words, HOROVOD_HIERARCHICAL_ALLREDUCE="0") as job:
        output, complained = job.communicate(timeout=100)
    assert job.returncode == 0, output + complained
    assert complained.count("HOROVOD_HIERARCHICAL_ALLREDUCE=0 has no effect") == 1, complained


SUM = """
import json, os, torch, torch.distributed as dist
import farandole.torch.distributed
dist.init_process_group("farandole")
tensor = torch.full((4,), float(dist.get_rank() + 1))
dist.all_reduce(tensor)
os.write(1, json.dumps({"rank": dist.get_rank(), "sum": tensor.tolist()}).encode() + b"\\n")
dist.destroy_process_group()
"""


@pytest.mark.parametrize("launcher", MPIS)
def test_torch_distributed_runs_on_it(launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SUM)
    with started(command(launcher, 2, str(script))) as job:
        found = sorted(reports(finish(job)), key=lambda one: one["rank"])
    assert found == [{"rank": rank, "sum": [3.0] * 4} for rank in range(2)]
    assert not left()


def test_simultaneous_jobs_stay_separate_and_every_init_is_a_new_round() -> None:
    jobs = [(launcher, number) for launcher in MPIS for number in (1, 2)]
    with contextlib.ExitStack() as stack:
        running = []
        for index, (launcher, _) in enumerate(jobs):
            words = command(launcher, 2, PROGRAM, str(1 + index), "5")
            running.append(stack.enter_context(started(words)))
        for index, process in enumerate(running):
            found = reports(finish(process))
            assert len(found) == 10, found
            assert all(one["total"] == [2.0 * (1 + index)] and one["listening"] == [] for one in found), found
            assert sorted(one["place"] for one in found) == [[0, 2, 0, 2, 0, 1]] * 5 + [[1, 2, 1, 2, 0, 1]] * 5
    assert not left()


DIES = """
import os, signal, sys, numpy as np, farandole as hvd
hvd.init()
try:
    hvd.barrier()
    if hvd.rank() == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.allreduce(np.ones(1), name="b")
except hvd.HorovodInternalError as error:
    open(sys.argv[2], "w").write(f"{type(error).__name__} {error.rank}")
"""
LAZY = """
import os, sys, time, farandole as hvd
if int(os.environ["OMPI_COMM_WORLD_RANK"]) == int(sys.argv[1]):
    time.sleep(60)  # sleep: until it is killed
hvd.init()
"""


def test_a_rank_that_dies_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text(DIES)
    for victim in (0, 1):
        words = command("openmpi", 2, str(script), str(victim), str(tmp_path / f"{victim}"))
        words.insert(1, "--enable-recovery")  # or it kills the survivor, which may then be slower than that
        with started(words) as job:
            job.communicate(timeout=60)
        assert (tmp_path / f"{victim}").read_text() == f"PeerLost {victim}"
    assert not left()


def test_a_rank_that_never_comes(tmp_path: Path) -> None:
    script = tmp_path / "lazy.py"
    script.write_text(LAZY)
    for lazy, text in (
        (1, "1 of 2 ranks called init within 0.5 s; missing: rank 1"),
        (0, "rank 1 has not found rank 0"),
    ):
        began = time.monotonic()
        with started(command("openmpi", 2, str(script), str(lazy)), FARANDOLE_START_TIMEOUT="0.5") as job:
            _, complained = job.communicate(timeout=60)
        assert job.returncode != 0 and text in complained, complained
        in_time(time.monotonic() - began, 20.0, "missing a rank with a start timeout of 0.5 s")
    assert not left()


def run_alone(**environ: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **environ}
    words = [sys.executable, PROGRAM, "1", "1"]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)


def test_an_incomplete_environment_is_an_error_with_the_variables_that_were_found(tmp_path: Path) -> None:
    done = run_alone(OMPI_COMM_WORLD_RANK="1")
    assert done.returncode == 1
    assert "Open MPI: OMPI_COMM_WORLD_SIZE is not set, but seen: OMPI_COMM_WORLD_RANK=1" in done.stderr
    done = run_alone(OMPI_COMM_WORLD_RANK="1", FARANDOLE_LAUNCHER="none")
    assert done.returncode == 0 and reports(done.stdout)[0]["place"] == [0, 1, 0, 1, 0, 1]
    pod = {"JOB_COMPLETION_INDEX": "1", "FARANDOLE_JOB_SIZE": "2", "FARANDOLE_MEET_AT": "tcp:localhost:29417"}
    done = run_alone(**pod, FARANDOLE_SECRET_FILE=str(tmp_path / "nothing"))
    assert done.returncode == 1 and "nothing: No such file" in done.stderr
    (tmp_path / "open").write_bytes(b"s" * 32)
    (tmp_path / "open").chmod(0o644)
    done = run_alone(**pod, FARANDOLE_SECRET_FILE=str(tmp_path / "open"))
    assert done.returncode == 1 and "chmod 600" in done.stderr


def test_the_next_start_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    """Rank 0 is killed while it waits in init, with its endpoint and its socket in path."""
    script = tmp_path / "waits.py"
    script.write_text(LAZY)
    with started(command("openmpi", 2, str(script), "1")) as job:
        path = Path(os.environ["TMPDIR"], f"farandole-{os.geteuid()}")
        until(lambda: path.exists() and any(path.iterdir()))
        (file,) = path.iterdir()
        os.kill(json.loads(file.read_text())["owner"]["pid"], signal.SIGKILL)
        job.wait(60)
    assert left(), "the fault has fired"
    with started(command("openmpi", 2, PROGRAM, "1", "1")) as job:
        finish(job)
    assert not left()
