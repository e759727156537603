# The names of horovod.torch, their arguments and defaults, as the contract has them.
# Touches farandole.torch; starts nothing.
"""A script written for Horovod finds every name, and its arguments mean the same."""

from __future__ import annotations

import inspect
import operator

import pytest

pytest.importorskip("torch")

import torch

import farandole.torch as hvd
from farandole.torch import memory

ALLREDUCE = "average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=SET"
COMPRESSED = (
    "average=None, name=None, compression=NONE, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=SET"
)
SCATTER = "name=None, op=0, process_set=SET, prescale_factor=1.0, postscale_factor=1.0"
SCATTER_COMPRESSED = "name=None, compression=NONE, op=0, process_set=SET, prescale_factor=1.0, postscale_factor=1.0"

# An argument that the contract does not have may follow, if it has a default.
CONTRACT = {
    "allreduce": f"tensor, {COMPRESSED}",
    "allreduce_async": f"tensor, {ALLREDUCE}",
    "allreduce_": f"tensor, {ALLREDUCE}",
    "allreduce_async_": f"tensor, {ALLREDUCE}",
    "grouped_allreduce": f"tensors, {COMPRESSED}",
    "grouped_allreduce_async": f"tensors, {ALLREDUCE}",
    "grouped_allreduce_": f"tensors, {ALLREDUCE}",
    "grouped_allreduce_async_": f"tensors, {ALLREDUCE}",
    "sparse_allreduce_async": "tensor, name, op, process_set=SET",
    "allgather": "tensor, name=None, process_set=SET",
    "allgather_async": "tensor, name=None, process_set=SET",
    "grouped_allgather": "tensors, name=None, process_set=SET",
    "grouped_allgather_async": "tensors, name=None, process_set=SET",
    "broadcast": "tensor, root_rank, name=None, process_set=SET",
    "broadcast_async": "tensor, root_rank, name=None, process_set=SET",
    "broadcast_": "tensor, root_rank, name=None, process_set=SET",
    "broadcast_async_": "tensor, root_rank, name=None, process_set=SET",
    "alltoall": "tensor, splits=None, name=None, process_set=SET",
    "alltoall_async": "tensor, splits=None, name=None, process_set=SET",
    "reducescatter": f"tensor, {SCATTER_COMPRESSED}",
    "reducescatter_async": f"tensor, {SCATTER}",
    "grouped_reducescatter": f"tensors, {SCATTER_COMPRESSED}",
    "grouped_reducescatter_async": f"tensors, {SCATTER}",
    "join": "device=-1",
    "barrier": "process_set=SET",
    "poll": "handle",
    "synchronize": "handle",
    "broadcast_parameters": "params, root_rank",
    "broadcast_optimizer_state": "optimizer, root_rank, model=None",
    "broadcast_object": "obj, root_rank=0, name=None, process_set=SET",
    "allgather_object": "obj, name=None",
    "DistributedOptimizer": "optimizer, named_parameters=None, compression=NONE, backward_passes_per_step=1, op=0, "
    "gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False, process_set=SET",
    "SyncBatchNorm": "num_features, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True",
    "init": "comm=None, process_sets=None",
    "start_timeline": "file_path, mark_cycles=False",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "ProcessSet": "ranks_or_comm",
    "elastic.run": "func",
    "elastic.run_fn": "func, reset",
    "elastic.TorchState": "model=None, optimizer=None, kwargs",
    "elastic.ElasticSampler": "dataset, shuffle=True, seed=0",
    "elastic.State": "bcast_object, get_rank",
    "elastic.ObjectState": "bcast_object, get_rank, kwargs",
}

OTHERS = [
    "shutdown",
    "is_initialized",
    "stop_timeline",
    "size",
    "local_size",
    "cross_size",
    "rank",
    "local_rank",
    "cross_rank",
    "is_homogeneous",
    "mpi_threads_supported",
    "mpi_enabled",
    "mpi_built",
    "gloo_enabled",
    "gloo_built",
    "nccl_built",
    "ddl_built",
    "ccl_built",
    "cuda_built",
    "rocm_built",
    "Average",
    "Sum",
    "Adasum",
    "Min",
    "Max",
    "Product",
    "global_process_set",
    "Compression",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
]


def written(parameter: inspect.Parameter) -> str:
    default = parameter.default
    if default is inspect.Parameter.empty:
        return parameter.name
    if default is hvd.global_process_set:
        return f"{parameter.name}=SET"
    if default is hvd.Compression.none:
        return f"{parameter.name}=NONE"
    return f"{parameter.name}={int(default) if parameter.name == 'op' and default is not None else default!r}"


@pytest.mark.parametrize("name", CONTRACT)
def test_arguments_are_those_of_the_contract(name: str) -> None:
    parameters = list(inspect.signature(operator.attrgetter(name)(hvd)).parameters.values())
    expected = CONTRACT[name].split(", ")
    found = [written(parameter) for parameter in parameters]
    if name == "broadcast_object":
        found[0] = "obj"  # may be left out where the object comes from elsewhere
    assert found[: len(expected)] == expected
    assert all(parameter.default is not inspect.Parameter.empty for parameter in parameters[len(expected) :])


def test_every_name_is_there() -> None:
    assert {name.partition(".")[0] for name in CONTRACT} | set(OTHERS) <= set(hvd.__all__)
    assert all(hasattr(hvd, name) for name in hvd.__all__)
    assert callable(hvd.Compression.none.compress) and callable(hvd.Compression.fp16.decompress)


def test_memory_under_way_outlives_the_tensor_that_gave_it() -> None:
    tensor = torch.arange(1000.0)
    buffer = memory.TensorBuffer(tensor)
    tensor.data = torch.zeros(1)  # as module.half() does
    taken = torch.zeros(1000)  # would get the memory if it were free
    assert taken.data_ptr() != buffer.array.address
    assert buffer.array.array(buffer.dtype).tolist() == list(range(1000))


def test_tensors_that_are_negated_when_read_are_refused() -> None:
    lazily = torch.ones(1, dtype=torch.complex64).conj().imag
    with pytest.raises(ValueError, match="resolve_neg"):
        memory.TensorBuffer(lazily)
