# horovod.runner.common.util.host_hash: a name that is the same for all processes that share this host's memory.
# Reads /proc.
"""Host names are not enough to distinguish containers."""

from __future__ import annotations

import contextlib
import hashlib
import os

NAMESPACE_PATH = "/proc/self/ns"


def _namespaces() -> str:
    with contextlib.suppress(OSError):
        names = sorted(os.listdir(NAMESPACE_PATH))
        return " ".join(os.readlink(f"{NAMESPACE_PATH}/{name}") for name in names)
    return ""


def host_hash(salt: str | None = None) -> str:
    """The first part of the host's name, and a hash of it and of this process's namespaces."""
    name = os.uname().nodename
    text = f"{name}-{_namespaces()}" + (f"-{salt}" if salt is not None else "")
    return f"{name.partition('.')[0]}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
