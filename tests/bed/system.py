# The system calls that namespaces need, for the programs of the bed that run alone (Python before 3.12 has no setns).
# Touches libc.
"""Thin wrappers that raise OSError."""

from __future__ import annotations

import ctypes
import os
import signal

NEWNS, NEWUTS, NEWIPC, NEWPID, NEWNET = 0x00020000, 0x04000000, 0x08000000, 0x20000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}{arguments}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    _call("unshare", flags)


def setns(fd: int) -> None:
    _call("setns", fd, 0)


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    _call("mount", source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())


def sethostname(name: str) -> None:
    _call("sethostname", name.encode(), len(name.encode()))


def die_with_parent() -> None:
    """This process gets SIGKILL when the thread that started it ends."""
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
