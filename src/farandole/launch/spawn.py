# Starts processes, signals them with all their children, finds and ends whatever they left. The only file that does.
# Touches processes and /proc.
"""Workers run in sessions of their own and die with their agent; agents run behind a guard (see guard.py)."""

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

GIVE_UP_SECONDS = 10.0  # a process that survives SIGKILL for this long is the kernel's affair

# Resolved here: between fork and exec nothing may be looked up or imported.
_PRCTL = ctypes.CDLL(None, use_errno=True).prctl
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def become(name: str) -> None:
    """What `ps` and `top` call this process."""
    _PRCTL(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def adopt_orphans() -> None:
    """From now on every descendant whose parent dies becomes a child of this process."""
    _PRCTL(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def divide(outer: Callable[[int], NoReturn]) -> None:
    """Forks: the parent goes into `outer(child)` and never comes back, the child goes on."""
    child = os.fork()
    if child:
        try:
            outer(child)
        finally:
            os._exit(1)


def detach(body: Callable[[], int]) -> None:
    """Runs `body` in a process of its own session that belongs to nobody; its exit code is what `body` gives."""
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
    """One running rank, in the agent. `stdout` and `stderr` are the reading ends of its pipes."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None and process.stderr is not None
        self._process = process
        self.pid = process.pid
        self.stdout = process.stdout.fileno()
        self.stderr = process.stderr.fileno()

    @property
    def running(self) -> bool:
        """Whether its end has not been seen yet."""
        return self._process.returncode is None

    def send(self, number: int, group: bool) -> None:
        """Signals this process, or all that stayed in its group; once it is reaped, nobody."""
        if self.running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                (os.killpg if group else os.kill)(self.pid, number)

    def reap(self) -> int:
        """The exit code of a process that has ended (128 + signal if it was killed); its group ends with it."""
        # A zombie still holds its number, so that the group is surely the right one.
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
    """For a new process, before it becomes its program: it dies with its parent."""

    def tie() -> None:
        # The kernel sends this signal when the *thread* that started a process ends: the main one lives longest.
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return tie


def start_worker(
    command: Sequence[bytes], environment: Mapping[bytes, bytes], directory: bytes, inherit: Sequence[int]
) -> Worker:
    """Starts one rank; the caller is the agent's main thread. OSError when the command cannot be run."""
    process = subprocess.Popen(
        list(command),
        env=environment,
        cwd=directory or None,  # none is named: the agent's own
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
    """Starts an agent, or the ssh that leads to one, with `line` as its input and output; its errors are piped."""
    # A session of its own: Ctrl-C at the terminal is for the launcher alone.
    return subprocess.Popen(
        list(command), stdin=line, stdout=line, stderr=subprocess.PIPE, bufsize=0, start_new_session=True
    )


def start_tied_agent(
    command: Sequence[str], line: int, secret: int, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Starts an agent with `line` as its input and output that ends with the thread that calls this; it inherits the
    secret's descriptor."""
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
    """What a short command prints; nothing when it cannot be run."""
    try:
        done = subprocess.run(list(command), capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout + done.stderr


class Script:
    """A short program that is run now and then, such as one that finds hosts."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def run(self, seconds: float) -> tuple[int, str, str]:
        """Its exit code, output and errors. TimeoutError when it takes longer; OSError when it cannot be run."""
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
        """Ends it if it runs. Safe from any thread."""
        self._closed = True
        self._kill()

    def _kill(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)


def become_program(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """This process goes on as another program."""
    os.execvpe(command[0], list(command), dict(environment))


def next_dead_child() -> int:
    """The number of a child that has ended and is not reaped yet, or 0."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    return ended.si_pid if ended is not None else 0


def bury(pid: int) -> None:
    """Reaps a child that has ended."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def end_descendants() -> None:
    """Kills everything below this process until nothing is left. Orphans must come to it: see adopt_orphans."""
    deadline = time.monotonic() + GIVE_UP_SECONDS
    while time.monotonic() < deadline:
        kill(descendants(os.getpid()))
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return  # no child, hence no descendant
        time.sleep(0.001)


def end_orphans(rank: int, session: int, others: Mapping[int, int]) -> None:
    """Kills what a rank that has ended left behind, children that called setsid included.

    `session` is the rank's process, `others` the processes of ranks that still run, with their ranks: what belongs to
    them stays. A process that cannot be told to belong to anybody lives until the last rank has ended.
    """
    for _ in range(100):  # each time round, what was forked meanwhile is seen
        doomed: list[int] = []
        for child in children(os.getpid()):
            if child in others or _is_zombie(child):
                continue
            owner = _owner(child, session, rank, others)
            if owner == rank or (owner is None and not others):
                doomed += [child, *descendants(child)]
        if not doomed:
            return
        kill(doomed)
        time.sleep(0.001)


def _owner(pid: int, session: int, rank: int, others: Mapping[int, int]) -> int | None:
    """The rank (of an elastic job: the worker) that a process belongs to: by its session, or by its variable."""
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
    """SIGKILL to each that is still there and ours."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Children, their children, and so on."""
    found = children(pid)
    for child in found:  # grows while we walk
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
        # The process is gone, or this kernel has no such file: the long way.
        return [child for child, parent in _parents() if parent == pid]
    return found


def _parents() -> list[tuple[int, int]]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
                found.append((int(name), int(file.read().rpartition(")")[2].split()[1])))
    return found


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
