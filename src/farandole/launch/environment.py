# The variables of ranks: those of the launcher, without those of one host or one process, and with the rank's numbers.
# Pure, except that it asks for the C library's version: the environment is an argument.
"""Agents get the variables over their authenticated connection; no variable is ever part of a command line."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farandole.launch.slots import RankNumbers

# Variables that are valid for one process only: no rank gets them. A rank also does not get the settings with which
# another launcher gave this process its rank.
OF_ONE_PROCESS = (
    "BASH_FUNC_*", "OLDPWD", "SHLVL", "_", "_HOROVOD_SECRET_KEY", "FARANDOLE_SECRET_FILE",
)  # fmt: skip
# Variables that describe the launcher's host and session: ranks on other hosts have their own.
OF_ONE_HOST = (
    "HOME", "USER", "LOGNAME", "SHELL", "MAIL", "HOSTNAME", "PWD", "TMPDIR", "DISPLAY", "XAUTHORITY", "WINDOWID", "TTY",
    "SSH_*", "XDG_*", "DBUS_*", "GPG_*", "KRB5CCNAME", "*CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES", "GOMP_CPU_AFFINITY", "CONTAINER_*", "KUBERNETES_*",
)  # fmt: skip

# For scripts that take the address of torch.distributed's master from it. Horovod's variable with a port is not set,
# because there is no such server.
HOROVOD_ADDRESS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"


def forwarded(environ: Mapping[str, str], other_host: bool) -> dict[str, str]:
    """The variables that a rank gets from the launcher.

    >>> forwarded({"PATH": "/bin", "HOME": "/home/me", "FARANDOLE_RANK": "1"}, other_host=True)
    {'PATH': '/bin'}
    """
    from farandole.base.config import SETTINGS  # the agent imports this file and needs no settings

    of_ranks = (name for setting in SETTINGS.values() if setting.scope == "worker" for name in setting.variables)
    left_out = _matcher((*OF_ONE_PROCESS, *of_ranks, *(OF_ONE_HOST if other_host else ())))
    return {name: value for name, value in environ.items() if not left_out(name)}


def of_this_host(environ: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """The variables that an agent adds from its own environment, such as HOME."""
    belongs = _matcher(OF_ONE_HOST)
    return {name: value for name, value in environ.items() if belongs(name.decode(errors="replace"))}


def _matcher(names: tuple[str, ...]) -> Callable[[str], bool]:
    exact = {name for name in names if "*" not in name}
    patterns = [name for name in names if "*" in name]
    return lambda name: name in exact or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def keeping_memory(environ: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Variables that an agent adds so that ranks keep their memory between steps, in huge pages.

    Variables that the user has set are not changed. Without these variables the kernel must clear the same pages in
    each step: mimalloc (in torch's wheels for Arm) returns memory that was free for 10 ms, and malloc of the C library
    (in the wheels for x86) returns every block of 32 MiB or more immediately.
    """
    found = {} if b"MIMALLOC_PURGE_DELAY" in environ else {b"MIMALLOC_PURGE_DELAY": b"10000"}
    tunables = environ.get(b"GLIBC_TUNABLES", b"")
    if not any(name.startswith(b"MALLOC_") for name in environ) and b"malloc" not in tunables:
        found |= {
            b"MALLOC_MMAP_THRESHOLD_": _largest_on_heap(),
            b"MALLOC_TRIM_THRESHOLD_": b"%d" % (1 << 30),
            # Asks for huge pages, if the kernel gives them on request. Older C libraries ignore it.
            b"GLIBC_TUNABLES": b":".join(filter(None, (tunables, b"glibc.malloc.hugetlb=1"))),
        }
    return found


def _largest_on_heap() -> bytes:
    """The largest block on the heap. Older versions of the C library may refuse more than 32 MiB and use 128 KiB."""
    libc = (os.confstr("CS_GNU_LIBC_VERSION") or "") if "CS_GNU_LIBC_VERSION" in os.confstr_names else ""
    version = [int(part) for part in libc.removeprefix("glibc ").split(".") if part.isdecimal()]
    return b"%d" % (1 << 30 if version >= [2, 36] else 32 << 20)


def of_rank(numbers: RankNumbers, master: tuple[str, int]) -> dict[str, str]:
    """The variables that tell a rank its numbers: with our names, Horovod's names, and those of torch.distributed."""
    from farandole.base.config import (
        OF_OUR_LAUNCHERS,
        TORCH_VARIABLES,
    )  # the agent imports this file and needs no settings

    address, port = master
    return {
        **numbers.environment(),
        HOROVOD_ADDRESS: address,
        **{variable: str(getattr(numbers, name)) for name, variable in TORCH_VARIABLES.items()},
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        **OF_OUR_LAUNCHERS,
        "PYTHONUNBUFFERED": "1",
    }


def of_worker(worker: int, numbers: RankNumbers, master: tuple[str, int] | None, newcomer: bool) -> dict[str, str]:
    """The variables of a worker of an elastic job: its number, and its first rank. Each generation has new ranks.

    `master`: None leaves out the address of rank 0, which changes; torch.distributed then uses our rendezvous.
    `newcomer`: the job was training when this worker was started.
    """
    variables = of_rank(numbers, master or ("", 0))
    if master is None:
        left_out = (HOROVOD_ADDRESS, "MASTER_ADDR", "MASTER_PORT")
        variables = {name: value for name, value in variables.items() if name not in left_out}
    if newcomer:
        variables["FARANDOLE_NEWCOMER"] = "1"
    return {**variables, "FARANDOLE_ELASTIC": "1", "HOROVOD_ELASTIC": "1", "FARANDOLE_WORKER": str(worker)}
