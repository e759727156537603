# The command lines of mpirun and jsrun, to start ranks with another launcher.
# Pure: the kind of mpirun is an argument.
"""`--mpi` and `--jsrun`: mpirun or jsrun starts the processes. The ranks use our own links, as with any launcher."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from farandole.launch.environment import forwarded
from farandole.launch.hosts import Host

OPENMPI_MANY_HOSTS = 64


def flavour(version: str) -> str:
    """Which MPI an mpirun belongs to, from the output of its --version.

    >>> flavour("mpirun (Open MPI) 4.1.4")
    'openmpi'
    """
    lowered = version.lower()
    if "open mpi" in lowered or "openrte" in lowered:
        return "openmpi"
    if "spectrum" in lowered:
        return "spectrum"
    if "hydra" in lowered or "mpich" in lowered or "intel" in lowered:
        return "mpich"
    return ""


def mpirun(
    kind: str,
    np: int,
    hosts: Sequence[Host],
    command: Sequence[str],
    environ: Mapping[str, str],
    interfaces: Sequence[str] = (),
    extra: str = "",
    binding: str = "",
    ssh: tuple[int | None, str | None] = (None, None),
    root: bool = False,
) -> list[str]:
    """The whole command line. ValueError for an unknown mpirun."""
    names = list(forwarded(environ, other_host=True))
    listed = ",".join(f"{host.name}:{host.slots}" for host in hosts)
    if kind == "mpich":
        words = ["mpirun", "-np", str(np), *(["-hosts", listed] if hosts else []), "-genvlist", ",".join(names)]
        words += ["-iface", interfaces[0]] if interfaces else []
        return [*words, *shlex.split(binding), *shlex.split(extra), *command]
    if kind not in ("openmpi", "spectrum"):
        raise ValueError("this mpirun is neither Open MPI nor MPICH, Intel MPI or MVAPICH; use --gloo")
    words = ["mpirun", *(["--allow-run-as-root"] if root else []), "--tag-output", "-np", str(np)]
    words += ["-H", listed] if hosts else []
    words += shlex.split(binding) or (["-bind-to", "none", "-map-by", "slot"] if kind == "openmpi" else [])
    if interfaces:
        words += ["-mca", "btl_tcp_if_include", ",".join(interfaces)]
    port, identity = ssh
    remote = " ".join([*(["-p", str(port)] if port else []), *(["-i", shlex.quote(identity)] if identity else [])])
    words += ["-mca", "plm_rsh_args", remote] if remote else []
    if len(hosts) >= OPENMPI_MANY_HOSTS:
        words += ["-mca", "plm_rsh_no_tree_spawn", "true", "-mca", "plm_rsh_num_concurrent", str(len(hosts))]
    for name in names:
        words += ["-x", name]
    return [*words, *shlex.split(extra), *command]


def jsrun(np: int, hosts: Sequence[Host], command: Sequence[str], extra: str = "", binding: str = "") -> list[str]:
    """The command line of jsrun, with one resource set for each rank. LSF assigns the hosts."""
    if hosts:
        raise ValueError("--jsrun takes its hosts from LSF; leave -H and --hostfile out")
    return ["jsrun", "-n", str(np), "-a", "1", *shlex.split(binding), *shlex.split(extra), *command]
