# Starts worker processes, signals them with all their children, and tells when they end. The only file that does.
# Touches processes.
"""A worker runs in a session of its own and dies with its launcher."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence

# Resolved here: between fork and exec nothing may be looked up or imported.
_PRCTL = ctypes.CDLL(None, use_errno=True).prctl
_PR_SET_PDEATHSIG = 1


class Worker:
    """One running rank. `stdout` and `stderr` are the reading ends of its pipes, or None when it writes to ours."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._lock = threading.Lock()  # between signals and the moment the process is reaped
        self.pid = process.pid
        self.stdout = process.stdout
        self.stderr = process.stderr
        try:
            self.pidfd: int | None = os.pidfd_open(process.pid)
        except (OSError, AttributeError):
            self.pidfd = None  # an old kernel, or a sandbox: `reap` has to be tried now and then

    def send(self, number: int) -> None:
        """Signals this process alone."""
        with self._lock:
            self._process.send_signal(number)

    def send_all(self, number: int) -> None:
        """Signals the process and the children that stayed in its group; once it is reaped, nobody."""
        with self._lock:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, number)

    def reap(self) -> int | None:
        """The exit code if the process has ended (128 + signal if it was killed); its children end with it."""
        with self._lock:
            if self._process.returncode is None:
                # A zombie still holds its number, so that the group is surely the right one.
                ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is None:
                    return None
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)
                self._process.wait()
            code = self._process.returncode
        return code if code >= 0 else 128 - code

    def close(self) -> None:
        """Closes the descriptors; the process must have been reaped."""
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        for pipe in (self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()


def start(command: Sequence[str], environment: Mapping[str, str], inherit: Sequence[int], piped: bool) -> Worker:
    """Starts one worker. OSError when the command cannot be run."""
    launcher = os.getpid()
    # The kernel sends the parent-death signal when the *thread* that started a process ends; only the main thread lives
    # as long as the launcher.
    mortal = threading.current_thread() is threading.main_thread()

    def tie() -> None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != launcher:  # it died before the line above
            os._exit(1)

    process = subprocess.Popen(
        list(command),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if piped else None,
        stderr=subprocess.PIPE if piped else None,
        bufsize=0,
        pass_fds=tuple(inherit),
        start_new_session=True,
        preexec_fn=tie if mortal else None,
    )
    return Worker(process)
