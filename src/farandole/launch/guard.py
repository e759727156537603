# The guard of a host: it waits until the agent ends, and kills all processes that the agent left.
# Touches processes through spawn.py, and the job's private directory.
"""[launcher or sshd] -> guard -> agent -> workers.

Both adopt orphans: when the agent dies, all processes below it become children of the guard. When the guard dies, the
agent sees the end of its pipe. When the launcher dies, the agent sees the end of its connection. So if one of them is
killed, another one kills the rest.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import NoReturn

from farandole.launch import spawn
from farandole.rendezvous import sockets

DEAF_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # the guard ends only with the agent


def stand(directory: str) -> int:
    """Starts a guard above this process. Returns a pipe that is closed when the guard ends."""
    spawn.adopt_orphans()
    reader, writer = os.pipe2(os.O_CLOEXEC)

    def watch(agent: int) -> NoReturn:
        os.close(reader)
        _watch(agent, directory)

    spawn.divide(watch)
    os.close(writer)
    spawn.adopt_orphans()  # the child of a fork does not inherit it
    return reader


def _watch(agent: int, directory: str) -> NoReturn:
    spawn.become("farandole-guard")
    for number in DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    # Readers of these streams must wait only until the agent ends, not until the guard ends.
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(agent, 0)
    spawn.end_descendants()
    sockets.remove_directory(directory)
    os._exit(0)
