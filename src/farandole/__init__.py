# The package's face: init, rank, size, the collectives, process sets, errors.
# Re-exports alone, each when it is asked for; imports no framework.
"""Distributed training with the few lines you know from Horovod.

>>> import farandole, numpy
>>> farandole.init()
>>> farandole.allreduce(numpy.ones(3), op=farandole.Sum)
array([1., 1., 1.])
>>> farandole.shutdown()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base.config import (
        Config,
    )
    from .base.errors import (
        FarandoleTimeout,
        HorovodInternalError,
        HorovodVersionMismatchError,
        HostsUpdatedInterrupt,
        LibraryMissing,
        Mismatch,
        NotInitialized,
        PeerLost,
        RankFailed,
        Revoked,
        ShutDown,
    )
    from .engine.interface import (
        DType,
        ReduceOp,
    )
    from .launch.executor import (
        Executor,
        run,
    )
    from .operations.objects import (
        allgather_object,
        broadcast_object,
    )
    from .operations.ops import (
        Adasum,
        Average,
        Max,
        Min,
        Product,
        Sum,
        allgather,
        allgather_async,
        allreduce,
        allreduce_,
        allreduce_async,
        allreduce_async_,
        alltoall,
        alltoall_async,
        barrier,
        broadcast,
        broadcast_,
        broadcast_async,
        broadcast_async_,
        grouped_allgather,
        grouped_allgather_async,
        grouped_allreduce,
        grouped_allreduce_,
        grouped_allreduce_async,
        grouped_allreduce_async_,
        grouped_reducescatter,
        grouped_reducescatter_async,
        irecv,
        isend,
        join,
        poll,
        recv,
        reducescatter,
        reducescatter_async,
        send,
        synchronize,
    )
    from .world.basics import (
        add_process_set,
        ccl_built,
        cross_rank,
        cross_size,
        cuda_built,
        ddl_built,
        gloo_built,
        gloo_enabled,
        init,
        is_homogeneous,
        is_initialized,
        local_rank,
        local_size,
        mpi_built,
        mpi_enabled,
        mpi_threads_supported,
        nccl_built,
        rank,
        remove_process_set,
        rocm_built,
        shutdown,
        size,
        start_timeline,
        stop_timeline,
    )
    from .world.groups import (
        ProcessSet,
        global_process_set,
    )

    __version__: str

__all__ = [
    "Adasum",
    "Average",
    "Config",
    "DType",
    "Executor",
    "FarandoleTimeout",
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "LibraryMissing",
    "Max",
    "Min",
    "Mismatch",
    "NotInitialized",
    "PeerLost",
    "ProcessSet",
    "Product",
    "RankFailed",
    "ReduceOp",
    "Revoked",
    "ShutDown",
    "Sum",
    "__version__",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "irecv",
    "is_homogeneous",
    "is_initialized",
    "isend",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "recv",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "run",
    "send",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

_HOMES = {  # where each public name lives
    "base.config": "Config",
    "engine.interface": "DType ReduceOp",
    "base.errors": (
        "FarandoleTimeout HorovodInternalError HorovodVersionMismatchError HostsUpdatedInterrupt "
        "LibraryMissing Mismatch NotInitialized PeerLost RankFailed Revoked ShutDown"
    ),
    "world.groups": "ProcessSet global_process_set",
    "launch.executor": "Executor run",
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
