# The guard of a host: does nothing but wait for the agent to end, and ends whatever it left.
# Touches processes through spawn.py, and the job's private directory.
"""[launcher or sshd] -> guard -> agent -> workers.

Everything below the agent falls to the guard when the agent dies, because both adopt orphans; when the guard dies, the
agent notices that its pipe has ended; when the launcher dies, the agent notices that its line has. So whichever one is
killed, another is left that kills the rest.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import NoReturn

from farandole.launch import spawn
from farandole.rendezvous import sockets

DEAF_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # it ends with the agent and not before


def stand(directory: str) -> int:
    """Puts a guard over this process, which from now on is the agent's; a descriptor that ends when the guard does."""
    spawn.adopt_orphans()
    reader, writer = os.pipe2(os.O_CLOEXEC)

    def watch(agent: int) -> NoReturn:
        os.close(reader)
        _watch(agent, directory)

    spawn.divide(watch)
    os.close(writer)
    spawn.adopt_orphans()  # it is not inherited
    return reader


def _watch(agent: int, directory: str) -> NoReturn:
    spawn.become("farandole-guard")
    for number in DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    # Whoever reads our streams waits for the agent's end, not for ours.
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(agent, 0)
    spawn.end_descendants()
    sockets.remove_directory(directory)
    os._exit(0)
