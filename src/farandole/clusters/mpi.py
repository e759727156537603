# Detectors for MPI's launchers: Open MPI, MVAPICH2, MPICH and Intel MPI (Hydra), Cray PALS, IBM jsrun.
# Pure: the environment and the ancestors of this process are arguments.
"""Places and keys come from variables. Only Hydra has no variable for the key: its proxy identifies the job."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from farandole.clusters.ancestors import Process
from farandole.clusters.cluster_rank import (
    REMEDY,
    ClusterError,
    ClusterRank,
    Environ,
    key,
    number,
    rank_numbers,
    seen,
    value,
)

Ancestors = Callable[[], Sequence[Process]]
HYDRA_PROXY = "hydra_pmi_proxy"
PALS_NAMES = {"RANK": "RANKID", "SIZE": "SIZE", "LOCAL_RANK": "LOCAL_RANKID", "LOCAL_SIZE": "LOCAL_SIZE"}  # PMI: PALS


def open_mpi(environ: Environ, host: str, ancestors: Ancestors) -> ClusterRank | None:
    """Open MPI 4 and 5, and Spectrum MPI."""
    title = "Open MPI"
    if (numbers := rank_numbers(title, environ, "OMPI_COMM_WORLD")) is None:
        return None
    # The namespace is a short hash in Open MPI 4: the other two are there so that no other job has the same key.
    needed = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "JSM_NAMESPACE_ID")
    more = ("OMPI_MCA_orte_hnp_uri", "OMPI_MCA_orte_precondition_transports", "LSB_JOBID")
    return _found("openmpi", title, numbers, host, lambda: key(title, environ, (*needed, *more), needed))


def mvapich2(environ: Environ, host: str, ancestors: Ancestors) -> ClusterRank | None:
    """MVAPICH2 under mpirun_rsh or Hydra."""
    title = "MVAPICH2"
    if (numbers := rank_numbers(title, environ, "MV2_COMM_WORLD")) is None:
        return None
    return _found("mvapich2", title, numbers, host, lambda: _hydra_key(title, environ, ancestors, numbers))


def hydra(environ: Environ, host: str, ancestors: Ancestors) -> ClusterRank | None:
    """MPICH and Intel MPI. PMI_RANK alone is not enough: SLURM and Flux set it too."""
    if value(environ, "MPI_LOCALRANKID", "MPI_LOCALNRANKS") is None:
        return None
    intel = any(name.startswith("I_MPI_") for name in environ)
    title = "Intel MPI" if intel else "MPICH"
    names = (("PMI_RANK", "PMI_ID"), ("PMI_SIZE",), ("MPI_LOCALRANKID",), ("MPI_LOCALNRANKS",))
    numbers = [number(title, environ, *each) for each in names]
    return _found("mpich", title, numbers, host, lambda: _hydra_key(title, environ, ancestors, numbers))


def pals(environ: Environ, host: str, ancestors: Ancestors) -> ClusterRank | None:
    """Cray PALS, with its own variables or PMI's."""
    if value(environ, "PALS_RANKID", "PALS_LOCAL_RANKID", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE") is None:
        return None
    title = "PALS"
    names = [(f"PMI_{what}", f"PALS_{own}") for what, own in PALS_NAMES.items()]
    numbers = [number(title, environ, *each) for each in names]
    needed = ("PALS_APID", "PMI_JOBID")
    return _found("pals", title, numbers, host, lambda: key(title, environ, (*needed, "PBS_JOBID"), needed))


def jsrun(environ: Environ, host: str, ancestors: Ancestors) -> ClusterRank | None:
    """IBM's jsrun under LSF."""
    title = "jsrun"
    if (numbers := rank_numbers(title, environ, "JSM_NAMESPACE")) is None:
        return None
    # LSB_JOBID alone would be the same for two steps of one allocation.
    needed = ("PMIX_NAMESPACE", "JSM_NAMESPACE_ID", "JSM_JSRUN_STEP_ID")
    return _found("jsrun", title, numbers, host, lambda: key(title, environ, (*needed, "LSB_JOBID"), needed))


def _found(launcher: str, title: str, numbers: Sequence[int], host: str, find_key: Callable[[], str]) -> ClusterRank:
    """`numbers`: rank, size, local rank and local size. A job of one rank needs no key."""
    rank, size, local_rank, local_size = numbers
    key_of_job = find_key() if size > 1 else title
    return ClusterRank(launcher, title, rank, size, local_rank, local_size, host, key_of_job, mpi=True)


def _hydra_key(title: str, environ: Environ, ancestors: Ancestors, numbers: Sequence[int]) -> str:
    """Hydra exports no name of the job. On one host the ranks have one proxy; over hosts all proxies use one port."""
    _, size, _, local_size = numbers
    proxy = next((process for process in ancestors() if process.name == HYDRA_PROXY), None)
    if proxy is not None and size == local_size:
        return f"hydra proxy {proxy.pid} started {proxy.started}"
    if proxy is not None:
        options = ("--control-port", "--upstream-host", "--upstream-port", "--pgid")
        found = [f"{option} {text}" for option in options if (text := proxy.option(option)) is not None]
        if len(found) > 1:
            return " ".join(["hydra", *found])
    if port := value(environ, "PMI_PORT"):
        return f"hydra PMI_PORT={port}"
    raise ClusterError(
        f"{title}: no {HYDRA_PROXY} among the processes above this one and no PMI_PORT, so two jobs could not be "
        f"distinguished; {seen(environ, 'PMI_RANK')}{REMEDY}"
    )
