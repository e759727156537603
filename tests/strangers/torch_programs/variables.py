"""Scripts that find their place in the environment, by Horovod's variables or mpirun's, before or without init().
Ends with what init() says."""

import os

import horovod.torch as hvd


def from_environment():
    """As in scripts that choose a GPU before they import a framework."""
    for rank, size, local in (
        ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ):
        if rank in os.environ:
            return int(os.environ[rank]), int(os.environ[size]), int(os.environ.get(local, 0))
    return 0, 1, 0


rank, size, local_rank = from_environment()
if "HOROVOD_RANK" in os.environ:  # by the launcher
    assert int(os.environ["HOROVOD_LOCAL_SIZE"]) == size
    assert int(os.environ["HOROVOD_CROSS_RANK"]) == 0 and int(os.environ["HOROVOD_CROSS_SIZE"]) == 1
    assert os.environ["HOROVOD_CONTROLLER"] == "gloo" and os.environ["HOROVOD_CPU_OPERATIONS"] == "gloo"
    assert os.environ["HOROVOD_HOSTNAME"]
    assert os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == os.environ["MASTER_ADDR"]
os.environ["CUDA_VISIBLE_DEVICES"] = ""
hvd.init()
assert (rank, size, local_rank) == (hvd.rank(), hvd.size(), hvd.local_rank())
assert hvd.is_initialized() and hvd.local_size() == size and (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
assert hvd.is_homogeneous() is True
for built in (hvd.mpi_built, hvd.gloo_built, hvd.ccl_built, hvd.ddl_built, hvd.cuda_built, hvd.rocm_built):
    assert isinstance(built(), bool), built
assert isinstance(hvd.nccl_built(), int)
assert hvd.gloo_enabled() or hvd.mpi_enabled()
if not hvd.mpi_enabled():
    try:
        hvd.mpi_threads_supported()
    except ValueError:
        pass
print("Number of processes: %d, local rank %d" % (hvd.size(), hvd.local_rank()))
