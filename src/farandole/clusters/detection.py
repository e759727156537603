# Which launcher started this process: the detectors in order, and the check for contradictions.
# Pure, except that jobs of MPICH need /proc.
"""The innermost launcher comes first: torchrun and mpirun run inside allocations of SLURM."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

from farandole.base.config import SETTINGS, Config
from farandole.clusters import mpi, schedulers, server
from farandole.clusters.ancestors import ancestors as processes_above
from farandole.clusters.ancestors import pid_namespace
from farandole.clusters.cluster_rank import REMEDY, ClusterError, ClusterRank, Environ, number, seen, value

Detector = Callable[[Environ, str, mpi.Ancestors], ClusterRank | None]
# The values of FARANDOLE_LAUNCHER in the order in which the detectors run.
DETECTORS: dict[str, Detector] = {
    "server": server.detect,
    "torchrun": schedulers.torchrun,
    "openmpi": mpi.open_mpi,
    "mvapich2": mpi.mvapich2,
    "mpich": mpi.hydra,
    "pals": mpi.pals,
    "jsrun": mpi.jsrun,
    "flux": schedulers.flux,
    "slurm": schedulers.slurm,
    "indexed-job": schedulers.indexed_job,
}
OURS = [name for setting in ("rank", "size") for name in (SETTINGS[setting].variable, *SETTINGS[setting].aliases)]


def detect(
    environ: Environ, launcher: str = "auto", host: str = "", ancestors: mpi.Ancestors = processes_above
) -> ClusterRank | None:
    """The numbers of this process, or None for a world of one. `launcher`: the setting of this name.

    >>> four = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}
    >>> detect(four).rank
    1
    """
    host = host or _this_host()
    # It sets Horovod's rank as well. Our own launchers set that and the address, and no port.
    from_server = launcher == "auto" and value(environ, server.PORT)
    if launcher == "none" or (value(environ, *OURS) and not from_server):
        return None  # the rank is set already; Config and mesh check that it is complete
    if launcher != "auto":
        found = DETECTORS[launcher](environ, host, ancestors)
        if found is None:
            raise ClusterError(f"FARANDOLE_LAUNCHER={launcher}, but its variables are not set")
        return found
    for detector in DETECTORS.values():
        found = detector(environ, host, ancestors)
        if found is not None:
            if found.mpi:
                _check_agreement(environ, host, ancestors, found)
            return found
    _check_leftovers(environ)
    return None


def with_numbers(config: Config, found: ClusterRank) -> Config:
    """The settings with the numbers of this process in them; `join_cluster` fills in what only the rendezvous knows."""
    return dataclasses.replace(
        config,
        rank=found.rank,
        size=found.size,
        local_rank=found.local_rank,
        local_size=found.local_size or found.size,
        hostname=found.hostname,
    )


def _this_host() -> str:
    """The name of this host, made unique if it has only a default name."""
    name = os.uname().nodename
    return f"{name}-{pid_namespace()[:8]}" if name.partition(".")[0] in ("", "localhost", "(none)") else name


def _check_agreement(environ: Environ, host: str, ancestors: mpi.Ancestors, found: ClusterRank) -> None:
    """Refuses variables of two MPIs with different ranks: one set is of another job, and we do not know which."""
    for name, detector in DETECTORS.items():
        if name == found.launcher:
            continue
        try:
            other = detector(environ, host, ancestors)
        except ClusterError:
            continue  # an incomplete set of another launcher
        if other is None or not other.mpi or (other.rank, other.size) == (found.rank, found.size):
            continue
        raise ClusterError(
            f"{found.title} says rank {found.rank} of {found.size}, {other.title} says rank {other.rank} of "
            f"{other.size}; {seen(environ, 'OMPI_COMM_WORLD_RANK')}; {seen(environ, 'PMI_RANK')}{REMEDY}"
        )


def _check_leftovers(environ: Environ) -> None:
    """Refuses variables of a job with several ranks that no detector understands, instead of starting N worlds of
    one.
    """
    for rank, size in (("PMI_RANK", "PMI_SIZE"), ("RANK", "WORLD_SIZE"), ("PMIX_RANK", "")):
        if value(environ, rank) is None or (size and value(environ, size) is None):
            continue
        if not size:
            if value(environ, "PMIX_NAMESPACE") and value(environ, "SLURM_STEP_ID") is None:
                raise ClusterError(f"PMIx gives neither a size nor a local rank; {seen(environ, rank)}{REMEDY}")
        elif number("half of a launcher", environ, size) > 1:
            raise ClusterError(f"{rank} and {size} are set, but no local rank; {seen(environ, rank)}{REMEDY}")
