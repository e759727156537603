# horovod.runner.common.util.env: which variables are sent to ranks, and the rank of this process.
# Reads the environment.
"""For programs that start ranks themselves, as Horovod's launcher does."""

from __future__ import annotations

import os
from typing import Any

from farandole.base.config import Config
from farandole.launch import environment

LOG_LEVEL_STR = ["FATAL", "ERROR", "WARNING", "INFO", "DEBUG", "TRACE"]
IGNORE_REGEXES = {"BASH_FUNC_.*", "OLDPWD", "_HOROVOD_SECRET_KEY", ".*CUDA_VISIBLE_DEVICES"}
KUBEFLOW_MPI_EXEC = "/etc/mpi/kubexec.sh"


def is_exportable(v: str) -> bool:
    """Whether ranks on other hosts get this variable.

    >>> is_exportable("PATH"), is_exportable("OLDPWD")
    (True, False)
    """
    return v in environment.forwarded({v: ""}, other_host=True)


def get_env_rank_and_size() -> tuple[int, int]:
    """Rank and size from the variables of Horovod, ours, or of another launcher; (0, 1) without them."""
    from farandole.clusters import detect

    found = detect(dict(os.environ))
    if found is not None:
        return found.rank, found.size
    config = Config.from_environment()
    return config.rank, config.size


def is_kubeflow_mpi(env: Any = None) -> bool:
    """Whether a Kubernetes operator has set the program with which mpirun reaches other pods."""
    return bool((os.environ if env is None else env).get("OMPI_MCA_plm_rsh_agent") == KUBEFLOW_MPI_EXEC)
