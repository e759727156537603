# The public names of the package: init, rank, size, the collectives, process sets, errors.
# Only re-exports names, each when it is first used; imports no framework.
"""Distributed training with the few lines you know from Horovod.

>>> import farandole, numpy
>>> farandole.init()
>>> farandole.allreduce(numpy.ones(3), op=farandole.Sum)
array([1., 1., 1.])
>>> farandole.shutdown()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # star imports give these names to users of the package, as type checkers see it
    from .base.config import Config as Config
    from .base.errors import *  # noqa: F403
    from .engine.interface import DType as DType
    from .engine.interface import ReduceOp as ReduceOp
    from .launch.executor import Executor as Executor
    from .launch.executor import run as run
    from .launch.notebook import notebook_launcher as notebook_launcher
    from .operations.objects import allgather_object as allgather_object
    from .operations.objects import broadcast_object as broadcast_object
    from .operations.ops import *  # noqa: F403
    from .world.basics import *  # noqa: F403
    from .world.groups import ProcessSet as ProcessSet
    from .world.groups import global_process_set as global_process_set

    __version__: str

_HOMES = {  # where each public name lives
    "base.config": "Config",
    "engine.interface": "DType ReduceOp",
    "base.errors": (
        "FarandoleTimeout HorovodInternalError HorovodVersionMismatchError HostsUpdatedInterrupt "
        "LibraryMissing Mismatch NotInitialized PeerLost RankFailed Revoked ShutDown"
    ),
    "world.groups": "ProcessSet global_process_set",
    "launch.executor": "Executor run",
    "launch.notebook": "notebook_launcher",
    "operations.objects": "allgather_object broadcast_object",
    "operations.ops": (
        "Adasum Average Max Min Product Sum allgather allgather_async allreduce allreduce_ allreduce_async "
        "allreduce_async_ alltoall alltoall_async barrier broadcast broadcast_ broadcast_async "
        "broadcast_async_ grouped_allgather grouped_allgather_async grouped_allreduce grouped_allreduce_ "
        "grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter grouped_reducescatter_async "
        "irecv isend join poll recv reducescatter reducescatter_async send synchronize"
    ),
    "world.basics": (
        "add_process_set ccl_built cross_rank cross_size cuda_built ddl_built gloo_built gloo_enabled init "
        "is_homogeneous is_initialized local_rank local_size mpi_built mpi_enabled mpi_threads_supported "
        "nccl_built rank remove_process_set rocm_built shutdown size start_timeline stop_timeline"
    ),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = sorted(["__version__", *_MODULES])


def __getattr__(name: str) -> Any:
    # The launcher and its agents import this package and need none of its arrays: names are found when asked for.
    if name == "__version__":
        from .base.version import package_version

        return package_version()
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .base.named import module_of

    value = getattr(module_of(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
