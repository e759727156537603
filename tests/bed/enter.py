# Runs one command inside a host of the bed: python enter.py PID DIRECTORY COMMAND...
# Touches namespaces; connects the test and the command: passes signals in, and the exit code or signal out.
"""The command is a process of the host's PID namespace; it dies with this one."""

from __future__ import annotations

import os
import resource
import signal
import sys

import system

PASSED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}


def enter(pid: str) -> None:
    """Joins the namespaces of the host's first process; the mounts last, since /proc changes with them."""
    fds = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts", "ipc", "pid", "mnt")]
    for fd in fds:
        system.setns(fd)
        os.close(fd)


def become(command: list[str], directory: str, mask: set[signal.Signals]) -> None:
    """The child: the command itself."""
    system.die_with_parent()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them; the command must not
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        os.chdir(directory)
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(127)


def main() -> None:
    pid, directory, *command = sys.argv[1:]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED | {signal.SIGCHLD})
    try:
        enter(pid)
    except FileNotFoundError:
        sys.exit("the host is gone")
    child = os.fork()
    if child == 0:
        become(command, directory, mask)  # type: ignore[arg-type]
    null = os.open("/dev/null", os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)  # only the command must hold the ends of its pipes
    os.closerange(3, 4096)
    while (number := signal.sigwait(PASSED | {signal.SIGCHLD})) != signal.SIGCHLD or not (
        ended := os.waitpid(child, os.WNOHANG)
    )[0]:
        if number != signal.SIGCHLD:
            os.kill(child, number)
    code = os.waitstatus_to_exitcode(ended[1])
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
