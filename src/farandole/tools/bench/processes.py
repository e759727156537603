"""Starts what is measured, and ends it: other libraries do not run under the launcher that they are compared with.
The only file here that starts processes; gives them this process's environment and a few variables more."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...launch import spawn
from ...launch.environment import keeping_memory

HERE = Path(__file__).resolve().parent
PYTHON = sys.executable
TIMEOUT_SECONDS = 20.0  # for processes that were asked to end


class Failed(Exception):
    """A measurement that failed; the text says why."""


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours, one thread of arithmetic per process, no GPU, and a path on which `inside` is found."""
    inherited = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    calm = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    fixed = {
        "PYTHONPATH": ":".join([*inherited, str(HERE)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",  # Gloo looks up the host's name otherwise, which some hosts do not know
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    # Memory stays mapped between steps, as under our launcher. The same holds for all libraries.
    kept = {os.fsdecode(name): os.fsdecode(value) for name, value in keeping_memory(os.environb).items()}
    return {**os.environ, **kept, **calm, **fixed, **(more or {})}


class Process:
    """One command in the background; its output goes to a file."""

    def __init__(self, command: Sequence[str], said: Path, more: Mapping[str, str] | None = None, pass_fd: int = -1):
        self._said = said
        self._first = len(_read(said))
        fds = (pass_fd,) if pass_fd >= 0 else ()
        with open(said, "ab") as file:
            self._process = subprocess.Popen(
                list(command),
                # Torch keeps a cache in this folder.
                env=environment({"TORCHINDUCTOR_CACHE_DIR": str(said.parent / "torch"), **(more or {})}),
                cwd=said.parent,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=fds,
            )
        self.pid = self._process.pid

    def ended(self) -> bool:
        """Whether it has ended."""
        return self.code() is not None

    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()

    def printed(self) -> str:
        """What it has printed."""
        return _read(self._said)[self._first :].decode(errors="replace").strip()

    def family(self) -> list[int]:
        """Its process id and those of all processes below it."""
        return [self.pid, *spawn.descendants(self.pid)]

    def signal(self, number: int) -> None:
        """Sends a signal to the process and all processes below it."""
        for pid in self.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self, timeout: float = TIMEOUT_SECONDS) -> None:
        """Waits until it ends; kills it if it takes longer."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGKILL)
            self._process.wait()


def _read(path: Path) -> bytes:
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return b""


def seconds(command: Sequence[str], more: Mapping[str, str] | None = None, limit: float = 120.0) -> float:
    """How long a command takes from start to end; Failed when it fails."""
    began = time.perf_counter()
    done = _run(command, more, limit)
    took = time.perf_counter() - began
    if done.returncode != 0:
        raise Failed(f"{Path(command[0]).name} failed: {_end_of(done.stderr + done.stdout)}")
    return took


def says(command: Sequence[str], text: str = "") -> str:
    """What a short command prints, given `text` as its input; Failed when it fails."""
    done = _run(command, None, 30.0, text)
    if done.returncode != 0:
        raise Failed(f"{Path(command[0]).name} failed: {_end_of(done.stderr + done.stdout)}")
    return done.stdout


def _run(
    command: Sequence[str], more: Mapping[str, str] | None, limit: float, text: str = ""
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            list(command), env=environment(more), input=text, capture_output=True, text=True, timeout=limit
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Failed(f"{Path(command[0]).name}: {error}") from None


def _end_of(text: str) -> str:
    return text.strip()[-500:] or "it said nothing"


def has_torch() -> bool:
    """Whether this interpreter can import torch."""
    import importlib.util

    return importlib.util.find_spec("torch") is not None


def find(program: str) -> str | None:
    """A program on the path of users or of root."""
    return shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin:/usr/bin:/bin")
