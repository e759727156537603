# Detectors for launchers without MPI: SLURM, Flux, torchrun, and Kubernetes indexed jobs.
# Pure: the environment is an argument.
"""A job is a step of SLURM. An allocation, a batch script or an interactive shell is not a job."""

from __future__ import annotations

import re

from farandole.base.config import SETTINGS
from farandole.clusters.cluster_rank import REMEDY, ClusterError, ClusterRank, Environ, key, number, seen, value
from farandole.clusters.mpi import Ancestors

FIRST_SPECIAL_STEP = 0xFFFFFFF0  # batch scripts, interactive shells: SLURM numbers them from the end
MAX_NODES = 1_000_000


def slurm(environ: Environ, host: str, ancestors: Ancestors) -> ClusterRank | None:
    """A task of srun, with or without PMIx."""
    title = "SLURM"
    if value(environ, "SLURM_STEP_ID", "SLURM_STEPID") is None:
        return None  # salloc's shell and batch scripts have SLURM_NTASKS, but srun has not started them
    if number(title, environ, "SLURM_STEP_ID", "SLURM_STEPID") >= FIRST_SPECIAL_STEP:
        return None
    size = number(title, environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if size == 1:
        return None
    rank = number(title, environ, "SLURM_PROCID")
    local_rank = number(title, environ, "SLURM_LOCALID")
    node = number(title, environ, "SLURM_NODEID")
    number(title, environ, "SLURM_JOB_ID", "SLURM_JOBID")
    text = value(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    counts = tasks_per_node(text or "")
    if node >= len(counts) or sum(counts) != size:
        raise ClusterError(
            f"SLURM: SLURM_STEP_TASKS_PER_NODE={text!r} does not fit {size} tasks and node {node}; "
            f"{seen(environ, 'SLURM_STEP_ID')}{REMEDY}"
        )
    names = (
        "SLURM_CLUSTER_NAME",
        "SLURM_JOB_ID",
        "SLURM_JOBID",
        "SLURM_STEP_ID",
        "SLURM_STEPID",
        "SLURM_RESTART_COUNT",
    )
    # With the port of srun, equal job numbers of two clusters give different keys; so do numbers that are reused.
    found = key(title, environ, (*names, "SLURM_LAUNCH_NODE_IPADDR", "SLURM_STEP_LAUNCHER_PORT"))
    host = value(environ, "SLURMD_NODENAME") or host
    return ClusterRank("slurm", title, rank, size, local_rank, counts[node], host, found)


def tasks_per_node(text: str) -> list[int]:
    """The numbers in SLURM's short form; empty when it cannot be read.

    >>> tasks_per_node("2(x3),1")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,7})(?:\(x(\d{1,7})\))?", part.strip(), flags=re.ASCII)
        if match is None or len(counts) + int(match[2] or 1) > MAX_NODES:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def flux(environ: Environ, host: str, ancestors: Ancestors) -> ClusterRank | None:
    """A task of `flux run`."""
    title = "Flux"
    if value(environ, "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID") is None:
        return None
    rank = number(title, environ, "FLUX_TASK_RANK")
    size = number(title, environ, "FLUX_JOB_SIZE")
    local_rank = number(title, environ, "FLUX_TASK_LOCAL_ID")
    alone = value(environ, "FLUX_JOB_NNODES") == "1" or size == 1
    found = key(title, environ, ("FLUX_JOB_ID",))
    return ClusterRank("flux", title, rank, size, local_rank, size if alone else None, host, found)


def torchrun(environ: Environ, host: str, ancestors: Ancestors) -> ClusterRank | None:
    """torchrun, and others that set torch.distributed's four variables (Ray Train, Spark's TorchDistributor)."""
    elastic = value(environ, "TORCHELASTIC_RUN_ID") is not None
    four = [value(environ, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")]
    if not elastic and not all(four):
        return None
    title = "torchrun" if elastic else "torch.distributed's variables"
    rank = number(title, environ, "RANK")
    size = number(title, environ, "WORLD_SIZE")
    local_rank = number(title, environ, "LOCAL_RANK")
    local_size = number(title, environ, "LOCAL_WORLD_SIZE") if elastic or value(environ, "LOCAL_WORLD_SIZE") else None
    # The run id may be "none" in every job, so the store's address is part of the key.
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    found = key(title, environ, names, ("MASTER_PORT",)) if size > 1 else title
    if (group := value(environ, "GROUP_RANK")) and value(environ, "GROUP_WORLD_SIZE") != "1":
        host = f"{host}#{group}"  # each torchrun on a host counts its own local ranks
    agent = (value(environ, "TORCHELASTIC_USE_AGENT_STORE") or "").lower() == "true"
    store = f"{environ.get('MASTER_ADDR')}:{environ.get('MASTER_PORT')}" if agent else ""
    return ClusterRank("torchrun", title, rank, size, local_rank, local_size, host, found, store=store)


def indexed_job(environ: Environ, host: str, ancestors: Ancestors) -> ClusterRank | None:
    """A pod of a Kubernetes indexed job: only if the number of pods is set, because every indexed job has an index."""
    size_variable, meet_variable = SETTINGS["job_size"].variable, SETTINGS["meet_at"].variable
    if value(environ, size_variable) is None:
        return None
    title = "Kubernetes indexed job"
    size = number(title, environ, size_variable)
    rank = number(title, environ, "JOB_COMPLETION_INDEX")
    at = value(environ, meet_variable)
    secret = value(environ, SETTINGS["secret_file"].variable, SETTINGS["secret_fd"].variable)
    if size > 1 and (at is None or secret is None):
        raise ClusterError(
            f"{title}: {size_variable}={size} also needs {meet_variable}=tcp:HOST:PORT (the first pod's stable name) "
            f"and {SETTINGS['secret_file'].variable} (a mounted secret); {seen(environ, size_variable)}"
        )
    return ClusterRank("indexed-job", title, rank, size, 0, 1, host, f"{title} {at}")
