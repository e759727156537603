# The first process of a host of the bed: makes the host's namespaces and holds them until the test ends.
# Touches namespaces and mounts of its own; runs alone: python inside.py JSON
"""Reads commands from its standard input: `k` kills everything in the host; the end of the input ends the host.

Whatever happens to the test, nothing is left: this process is the first of a PID namespace, so that the kernel kills
the whole host with it, and takes the network, the mounts and the name away with the last process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import system

HIDDEN = {"/run": "mode=755", "/tmp": "mode=1777", "/dev/shm": "mode=1777"}


def mounts(spec: dict[str, Any]) -> None:
    """The host's own view of the file system; the paths in `visible` stay unchanged."""
    system.mount("none", "/", flags=system.MS_REC | system.MS_PRIVATE)
    system.mount("proc", "/proc", "proc")
    kept = [(path, os.open(path, os.O_PATH)) for path in spec["visible"] if is_hidden(path)]
    binds = [(os.open(source, os.O_PATH), target) for source, target in spec["binds"]]
    for index, data in HIDDEN.items():
        Path(index).mkdir(exist_ok=True)
        system.mount("tmpfs", index, "tmpfs", data=data)
    for path, fd in kept:
        bind(fd, path)
    for fd, target in binds:
        bind(fd, target)
    os.makedirs("/run/sshd", mode=0o755)


def is_hidden(path: str) -> bool:
    return any(Path(path).is_relative_to(place) for place in HIDDEN)


def bind(fd: int, target: str) -> None:
    source = f"/proc/self/fd/{fd}"
    if Path(source).is_dir():
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).touch()
    system.mount(source, target, flags=system.MS_BIND | system.MS_REC)
    os.close(fd)


def quiet_network() -> None:
    """No IPv6: its neighbour discovery would be counted among the test's bytes."""
    with contextlib.suppress(OSError):
        Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")
        Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")


def serve() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps orphans of the host
    while command := os.read(0, 1):
        if command == b"k":
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # all processes of this PID namespace except this one
        os.write(1, b"done\n")


def host(spec: dict[str, Any]) -> None:
    """Runs as process 1 of the host."""
    system.sethostname(spec["name"])
    mounts(spec)
    quiet_network()
    print("ready", flush=True)
    serve()


def main() -> int:
    system.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test, which then removes the bed
    spec = json.loads(sys.argv[1])
    if spec is None:  # the switch: only a network
        system.unshare(system.NEWNET)
        print(f"{os.getpid()}\nready", flush=True)
        serve()
        return 0
    system.unshare(system.NEWNS | system.NEWUTS | system.NEWIPC | system.NEWNET | system.NEWPID)
    child = os.fork()
    if child == 0:
        system.die_with_parent()
        try:
            host(spec)
        except OSError as error:
            print(error, flush=True)
        os._exit(0)
    os.write(1, f"{child}\n".encode())
    os.close(1)
    os.waitpid(child, 0)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OSError as error:  # no rights for namespaces: the parent process reads the error
        print(error, flush=True)
