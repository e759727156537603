# Starts processes, signals them and their children, and kills processes that they left. No other file does this.
# Touches processes and /proc.
"""Each worker has its own session and dies with its agent. Each agent runs below a guard (see guard.py)."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn

GIVE_UP_SECONDS = 10.0  # we do not wait longer for a process after SIGKILL: only the kernel can still end it

# Loaded at import, because nothing may be loaded or imported between fork and exec.
_LIBC = ctypes.CDLL(None, use_errno=True)
_PRCTL = _LIBC.prctl
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_TGKILL = {"x86_64": 234, "aarch64": 131}  # older C libraries have no function for it


def become(name: str) -> None:
    """Sets the name of this process that `ps` and `top` show."""
    _PRCTL(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def adopt_orphans() -> None:
    """From now on every descendant becomes a child of this process when its parent dies."""
    _PRCTL(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def divide(outer: Callable[[int], NoReturn]) -> None:
    """Forks. The parent calls `outer(child)`, which never returns; the child continues here."""
    child = os.fork()
    if child:
        try:
            outer(child)
        finally:
            os._exit(1)


def detach(body: Callable[[], int]) -> None:
    """Runs `body` in a background process with its own session. Its exit code is the result of `body`."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    code = 1
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, 0)
        code = body()
    finally:
        os._exit(code)


class Worker:
    """The agent's object for one running rank. `stdout` and `stderr` are the ends of its pipes that the agent reads."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None and process.stderr is not None
        self._process = process
        self.pid = process.pid
        self.stdout = process.stdout.fileno()
        self.stderr = process.stderr.fileno()

    @property
    def running(self) -> bool:
        """Whether it has not been reaped yet."""
        return self._process.returncode is None

    def send(self, number: int, group: bool) -> None:
        """Sends a signal to this process, or to its process group; does nothing after it was reaped."""
        if self.running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                (os.killpg if group else os.kill)(self.pid, number)

    def reap(self) -> int:
        """The exit code of a process that has ended (128 + signal if it was killed). Also kills its process group."""
        # A zombie keeps its process id, so no other group can have the same number.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._process.returncode = code
        return code if code >= 0 else 128 - code

    def close(self) -> None:
        """Closes the pipes."""
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


def _tied_to(parent: int) -> Callable[[], None]:
    """A function for a new process to call before it executes its program. The process then dies with its parent."""

    def tie() -> None:
        # The kernel sends this signal when the *thread* that started the process ends, so the main thread must do it.
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent died before the line above
            os._exit(1)

    return tie


def start_worker(
    command: Sequence[bytes], environment: Mapping[bytes, bytes], directory: bytes, inherit: Sequence[int]
) -> Worker:
    """Starts one rank. The agent's main thread must call it. OSError when the command cannot be run."""
    process = subprocess.Popen(
        list(command),
        env=environment,
        cwd=directory or None,  # "": the directory of the agent
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        pass_fds=tuple(inherit),
        start_new_session=True,
        restore_signals=True,
        preexec_fn=_tied_to(os.getpid()),
    )
    worker = Worker(process)
    os.set_blocking(worker.stdout, False)
    os.set_blocking(worker.stderr, False)
    return worker


def start_agent(command: Sequence[str], line: int) -> subprocess.Popen[bytes]:
    """Starts an agent, or ssh to an agent, with `line` as its input and output. Its error output is a pipe."""
    # In its own session, so that only the launcher gets Ctrl-C from the terminal.
    return subprocess.Popen(
        list(command), stdin=line, stdout=line, stderr=subprocess.PIPE, bufsize=0, start_new_session=True
    )


def start_tied_agent(
    command: Sequence[str], line: int, secret: int, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Starts an agent with `line` as its input and output. It dies when the calling thread ends, and inherits the
    descriptor `secret`."""
    return subprocess.Popen(
        list(command),
        stdin=line,
        stdout=line,
        env=environment,
        pass_fds=(secret,),
        start_new_session=True,
        restore_signals=True,
        preexec_fn=_tied_to(os.getpid()),
    )


def output_of(command: Sequence[str]) -> str:
    """The output of a short command; "" when it cannot be run."""
    try:
        done = subprocess.run(list(command), capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout + done.stderr


class Script:
    """A short program that is run repeatedly, such as one that finds hosts."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def run(self, seconds: float) -> tuple[int, str, str]:
        """Runs it: exit code, output, error output. TimeoutError if it is too slow, OSError if it cannot be run."""
        command = self._command
        if os.path.exists(command):
            if not os.access(command, os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            command = shlex.quote(command)
        elif not command.split()[1:] and shutil.which(command) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", command],  # arguments and pipes work as they do in Horovod
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            if self._closed:
                self._kill()
            out, err = self._process.communicate(timeout=seconds)
            return self._process.returncode, out.decode(errors="replace"), err.decode(errors="replace")
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"it did not end within {seconds:g} s") from None
        finally:
            self._kill()
            self._process.communicate()

    def close(self) -> None:
        """Ends the program if it runs. Safe from any thread."""
        self._closed = True
        self._kill()

    def _kill(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)


def become_program(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Replaces this process by another program."""
    os.execvpe(command[0], list(command), dict(environment))


def next_dead_child() -> int:
    """The process id of a child that has ended and is not reaped yet, or 0."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    return ended.si_pid if ended is not None else 0


def reap_child(pid: int) -> None:
    """Reaps a child that has ended."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def end_descendants() -> None:
    """Kills all descendants of this process until none is left. It must adopt orphans before: see adopt_orphans."""
    deadline = time.monotonic() + GIVE_UP_SECONDS
    while time.monotonic() < deadline:
        kill(descendants(os.getpid()))
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return  # without a child there is no descendant
        time.sleep(0.001)


def end_orphans(rank: int, session: int, others: Mapping[int, int]) -> None:
    """Kills the processes that a rank left when it ended, also those that called setsid.

    `session` is the rank's process. `others` are the processes of ranks that still run, with their ranks: their
    children are not killed. If the rank of a process is unknown, it is killed after the last rank has ended.
    """
    for _ in range(100):  # again, because processes may fork meanwhile
        doomed: list[int] = []
        for child in children(os.getpid()):
            if child in others or has_ended(child):
                continue
            owner = _owner(child, session, rank, others)
            if owner == rank or (owner is None and not others):
                doomed += [child, *descendants(child)]
        if not doomed:
            return
        kill(doomed)
        time.sleep(0.001)


def _owner(pid: int, session: int, rank: int, others: Mapping[int, int]) -> int | None:
    """The rank (in an elastic job: the worker) of a process, found by its session or by its variables."""
    with contextlib.suppress(OSError):
        found = os.getsid(pid)
        if found == session:
            return rank
        if found in others:
            return others[found]
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/environ", "rb") as file:
        entries = file.read().split(b"\0")
        for name in (b"FARANDOLE_WORKER=", b"FARANDOLE_RANK="):
            for entry in entries:
                if entry.startswith(name):
                    return int(entry.partition(b"=")[2])
    return None


def kill(pids: Iterable[int]) -> None:
    """Sends SIGKILL to each process that still exists and belongs to this user."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def signal_thread(pid: int, thread: int, number: int) -> None:
    """Sends a signal to one thread of a process; the waits of its other threads go on."""
    call = _TGKILL.get(os.uname().machine)
    if call is not None and thread > 0:
        _LIBC.syscall(*map(ctypes.c_long, (call, pid, thread, number)))


def signal_process(pid: int, number: int) -> None:
    """Sends a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def descendants(pid: int) -> list[int]:
    """The children of a process, their children, and so on."""
    found = children(pid)
    for child in found:  # the list grows during this loop
        found += children(child)
    return found


def children(pid: int) -> list[int]:
    """The children of a process, zombies included."""
    found: list[int] = []
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
        for task in tasks:
            with contextlib.suppress(ProcessLookupError), open(f"/proc/{pid}/task/{task}/children") as file:
                found += map(int, file.read().split())
    except FileNotFoundError:
        # The process has ended, or this kernel has no such file. Then we look at all processes.
        return [child for child, parent in _parents() if parent == pid]
    return found


def _parents() -> list[tuple[int, int]]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
                found.append((int(name), int(file.read().rpartition(")")[2].split()[1])))
    return found


def has_ended(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
