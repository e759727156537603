# Which variables ranks get: the launcher's own, what belongs to one host or one process left out, their place added.
# Pure but for the C library's version: the environment is an argument.
"""Variables travel to agents over their proven line; none is ever part of a command line."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farandole.launch.slots import Place

# What holds for one process alone: no rank gets it. So do the settings that a launcher above us gave to this process.
OF_ONE_PROCESS = (
    "BASH_FUNC_*", "OLDPWD", "SHLVL", "_", "_HOROVOD_SECRET_KEY", "FARANDOLE_SECRET_FILE",
)  # fmt: skip
# What describes the launcher's host and session: ranks on other hosts have their own.
OF_ONE_HOST = (
    "HOME", "USER", "LOGNAME", "SHELL", "MAIL", "HOSTNAME", "PWD", "TMPDIR", "DISPLAY", "XAUTHORITY", "WINDOWID", "TTY",
    "SSH_*", "XDG_*", "DBUS_*", "GPG_*", "KRB5CCNAME", "*CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES", "GOMP_CPU_AFFINITY", "CONTAINER_*", "KUBERNETES_*",
)  # fmt: skip


def forwarded(environ: Mapping[str, str], other_host: bool) -> dict[str, str]:
    """The variables of the launcher that a rank gets.

    >>> forwarded({"PATH": "/bin", "HOME": "/home/me", "FARANDOLE_RANK": "1"}, other_host=True)
    {'PATH': '/bin'}
    """
    from farandole.config import SETTINGS  # the agent imports this file and needs no settings

    places = (name for setting in SETTINGS.values() if setting.scope == "worker" for name in setting.variables)
    left_out = _matcher((*OF_ONE_PROCESS, *places, *(OF_ONE_HOST if other_host else ())))
    return {name: value for name, value in environ.items() if not left_out(name)}


def of_this_host(environ: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """What an agent adds from its own environment: HOME and the like."""
    belongs = _matcher(OF_ONE_HOST)
    return {name: value for name, value in environ.items() if belongs(name.decode(errors="replace"))}


def _matcher(names: tuple[str, ...]) -> Callable[[str], bool]:
    exact = {name for name in names if "*" not in name}
    patterns = [name for name in names if "*" in name]
    return lambda name: name in exact or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def keeping_memory(environ: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """What an agent adds for ranks, so that they keep memory between steps, in huge pages; unless the user has said
    something about it.

    Otherwise each step waits for the kernel to clear the same pages again: mimalloc, in torch's wheels for Arm, gives
    back what was free for 10 ms, and the C library's malloc, in those for x86, every block of 32 MiB or more at once.
    """
    found = {} if b"MIMALLOC_PURGE_DELAY" in environ else {b"MIMALLOC_PURGE_DELAY": b"10000"}
    tunables = environ.get(b"GLIBC_TUNABLES", b"")
    if not any(name.startswith(b"MALLOC_") for name in environ) and b"malloc" not in tunables:
        found |= {
            b"MALLOC_MMAP_THRESHOLD_": _largest_on_heap(),
            b"MALLOC_TRIM_THRESHOLD_": b"%d" % (1 << 30),
            # Asks for huge pages where the kernel grants them on request; older C libraries do not know it.
            b"GLIBC_TUNABLES": b":".join(filter(None, (tunables, b"glibc.malloc.hugetlb=1"))),
        }
    return found


def _largest_on_heap() -> bytes:
    """Older versions of the C library may refuse more than 32 MiB, and then keep 128 KiB."""
    said = (os.confstr("CS_GNU_LIBC_VERSION") or "") if "CS_GNU_LIBC_VERSION" in os.confstr_names else ""
    version = [int(part) for part in said.removeprefix("glibc ").split(".") if part.isdecimal()]
    return b"%d" % (1 << 30 if version >= [2, 36] else 32 << 20)


def of_place(place: Place, master: tuple[str, int]) -> dict[str, str]:
    """What tells a rank its place: our names, Horovod's, and those that torch.distributed looks for."""
    from farandole.config import OF_OUR_LAUNCHERS  # the agent imports this file and needs no settings

    address, port = master
    return {
        **place.environment(),
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        **OF_OUR_LAUNCHERS,
        "PYTHONUNBUFFERED": "1",
    }
