# Horovod's functions of one process: init, shutdown, rank, size, process sets, timelines, what was built.
# Touches the rooms base, engine and clusters; the files groups and runtime.
"""What scripts call; `runtime` does the work."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any

from ..base.config import Config, environment
from ..base.errors import LibraryMissing
from ..engine import cuda
from .groups import ProcessSet, as_sets, global_process_set
from .runtime import runtime

if TYPE_CHECKING:
    from ..clusters import ClusterRank


def _place(config: Config) -> tuple[Config, ClusterRank | None]:
    """The rank of this process: from `farandole run`, from another launcher's variables, or a world of one."""
    if config.rendezvous is not None:
        return config, None
    from ..clusters import detect, with_numbers

    found = detect(environment(), config.launcher)
    return (config, None) if found is None else (with_numbers(config, found), found)


def _check_comm(comm: Any, config: Config) -> None:
    if comm is None:
        return
    if hasattr(comm, "Get_rank"):
        raise ValueError(
            "init(comm=...) takes no MPI communicator; leave it out: under mpirun init() finds the ranks by itself"
        )
    ranks = ProcessSet(comm).ranks or []
    if config.rank not in ranks:
        raise ValueError(f"init(comm={ranks}): rank {config.rank} is not in this list; all ranks of the job must be")
    if ranks != list(range(config.size)):
        raise ValueError(
            f"init(comm={ranks}): the world is all {config.size} ranks of the job; "
            f"for fewer use init(process_sets=[{ranks}]) and pass process_set= to the operations"
        )


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Joins the job; without a launcher, a world of one. A second call does nothing.

    In an elastic job that is training already, it returns at once: this rank joins at its first operation or when its
    function of `elastic.run` begins, so that the others do not wait while it prepares. Until then rank() is larger
    than that of all others.

    `comm`: None, or the list of all ranks. `process_sets`: ProcessSets (or lists of ranks) that all ranks give alike,
    or "dynamic", which allows add_process_set later.
    """
    if runtime.initialized:
        return
    config, found = _place(Config.from_environment())
    _check_comm(comm, config)
    sets: list[ProcessSet] = []
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(f'process_sets={process_sets!r}: expected a list of process sets or "dynamic"')
        config = dataclasses.replace(config, dynamic_process_sets=True)
    elif process_sets is not None:
        sets = as_sets(process_sets)
    runtime.open(config, sets, found)


def shutdown() -> None:
    """Leaves the job; pending operations end with ShutDown, here and on the other ranks. init() may follow."""
    runtime.close()


def is_initialized() -> bool:
    """Whether init() has been called, and shutdown() not since."""
    return runtime.initialized


def rank() -> int:
    """This process's number in the job."""
    return runtime.rank


def size() -> int:
    """Number of processes in the job."""
    return runtime.size


def local_rank() -> int:
    """This process's number on its host; in an elastic job that of its slot, which stays."""
    return runtime.config.local_rank


def local_size() -> int:
    """Number of processes on this host; in an elastic job one more than the largest local rank there."""
    return runtime.config.local_size


def cross_rank() -> int:
    """This host's number among the hosts that have this local rank."""
    return runtime.config.cross_rank


def cross_size() -> int:
    """Number of hosts that have this local rank."""
    return runtime.config.cross_size


def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks."""
    world = runtime.world
    even = len(set(Counter(world.session.hosts).values())) == 1
    # Local ranks of an elastic job have gaps where a rank was lost.
    whole = bool(world.session.numbers) or world.config.local_size * world.config.cross_size == world.engine.size
    return even and whole


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Writes this rank's events to `file_path` (Chrome trace) until stop_timeline; replaces a running timeline."""
    runtime.world.trace(file_path, mark_cycles)


def stop_timeline() -> None:
    """Ends the timeline of this rank; without one it does nothing."""
    runtime.world.stop_trace()


def add_process_set(process_set: Any) -> ProcessSet:
    """Registers a ProcessSet (or a list of ranks) on all ranks; all of them call this with the same ranks."""
    world = runtime.world
    if not world.config.dynamic_process_sets:
        raise ValueError(
            'process sets can only be added after init(process_sets="dynamic") or with FARANDOLE_DYNAMIC_PROCESS_SETS=1'
        )
    [new] = as_sets([process_set])
    world.groups.add([new])
    return new


def remove_process_set(process_set: ProcessSet) -> bool:
    """Takes a process set away on all ranks; False for the global one and for one that is not registered."""
    world = runtime.world
    if process_set is global_process_set or process_set.process_set_id is None:
        return False
    if not world.config.dynamic_process_sets:
        raise ValueError(
            'process sets can only be removed after init(process_sets="dynamic") or with '
            "FARANDOLE_DYNAMIC_PROCESS_SETS=1"
        )
    return world.groups.remove(process_set)


# Which transport is used. Scripts ask this to choose a code path. With Gloo they choose the CPU path without mpirun,
# which Farandole's own links serve.


def mpi_enabled() -> bool:
    """False: MPI is never used."""
    return False


def mpi_built() -> bool:
    """False: MPI is never used."""
    return False


def mpi_threads_supported() -> bool:
    """ValueError, as in Horovod without MPI."""
    raise ValueError("Horovod MPI is not enabled; Farandole's own links move the bytes")


def gloo_enabled() -> bool:
    """True, so that scripts choose their CPU path: Farandole's own links replace Gloo."""
    return True


def gloo_built() -> bool:
    """True, for the same reason as gloo_enabled; no code of Gloo is inside."""
    return True


def nccl_built() -> int:
    """NCCL's version code (22809 is 2.28.9) if CUDA tensors may travel by it here; else 0. Loads CUDA's libraries.

    `farandole doctor` says which NCCL is here, or why it is not used.
    """
    config = Config.from_environment()
    try:
        return cuda.nccl_version(cuda.libraries(config), config)
    except LibraryMissing:
        return 0


def ddl_built() -> bool:
    """False: no DDL."""
    return False


def ccl_built() -> bool:
    """False: no oneCCL."""
    return False


def cuda_built() -> bool:
    """False: nothing here is compiled with CUDA, which is found at run time. `farandole doctor` names the GPUs."""
    return False


def rocm_built() -> bool:
    """False, also where a GPU is: CUDA tensors go through host memory. `farandole doctor` names the GPUs."""
    return False
