# Which variables ranks get: the launcher's own, what belongs to one host or one process left out, their place added.
# Pure: the environment is an argument.
"""Variables travel to agents over their proven line; none is ever part of a command line."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping

from farandole.config import SETTINGS
from farandole.launch.slots import Place

# What the launcher's own parent told it, or what holds for one process alone: no rank gets it.
OF_ONE_PROCESS = (
    *(variable for setting in SETTINGS.values() if setting.scope == "worker" for variable in setting.variables),
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
    left_out = OF_ONE_PROCESS + (OF_ONE_HOST if other_host else ())
    exact = {name for name in left_out if "*" not in name}
    patterns = [name for name in left_out if "*" in name]
    return {
        name: value
        for name, value in environ.items()
        if name not in exact and not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }


def of_place(place: Place, master: tuple[str, int]) -> dict[str, str]:
    """What tells a rank its place: our names, Horovod's, and those that torch.distributed looks for."""
    address, port = master
    return {
        **place.environment(),
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "PYTHONUNBUFFERED": "1",
    }
