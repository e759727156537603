# Parallelism in two dimensions on four ranks: HSDP, FSDP x tensor parallel, pipeline x data; and compiled graphs.
# Touches torch.distributed as users see it.
"""Each case gives losses and parameters after its steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from distributed_job import close
from distributed_training_cases import batch, model_of, sgd, steps, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


@close
def hsdp(rank: int, size: int) -> Any:
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    model = model_of()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return [steps(model, optimizer, rank), whole(model)]


@close
def fsdp_of_tensor_parallel(rank: int, size: int) -> Any:
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return [steps(model, optimizer, mesh["data"].get_local_rank()), whole(model)]


def _pipelined(schedule_of: Any, rank: int, size: int) -> Any:
    """Two stages by `size // 2` replicas; each replica has its own batches, and gradients are averaged."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("pipeline", "data"))
    stages, data = mesh["pipeline"].get_group(), mesh["data"].get_group()
    place, replica = mesh["pipeline"].get_local_rank(), mesh["data"].get_local_rank()
    layers = list(model_of())
    part = nn.Sequential(*(layers[:2] if place == 0 else layers[2:]))
    stage = PipelineStage(part, place, 2, torch.device("cpu"), group=stages)
    schedule = schedule_of(stage, 3, loss_fn=nn.functional.mse_loss)
    optimizer = sgd(part)
    found: list[Any] = []
    for step in range(4):
        x, y = batch(replica, step)
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if place == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
        for param in part.parameters():
            grad: Any = param.grad
            dist.all_reduce(grad, group=data)
            grad.div_(size // 2)
        optimizer.step()
        found += [loss.detach() for loss in losses]
    return [found, whole(part)]


@close
def pipeline_of_data_gpipe(rank: int, size: int) -> Any:
    return _pipelined(ScheduleGPipe, rank, size)


@close
def pipeline_of_data_1f1b(rank: int, size: int) -> Any:
    return _pipelined(Schedule1F1B, rank, size)


@close
def compiled(rank: int, size: int) -> Any:
    group: Any = dist.group.WORLD

    def mixed(x: torch.Tensor) -> torch.Tensor:
        total = functional.all_reduce(x * 2, "sum", group)
        rows = functional.all_gather_tensor(total + rank, 0, group)
        return functional.reduce_scatter_tensor(rows.sin(), "sum", 0, group) + total

    x = torch.arange(float(4 * size)).reshape(2 * size, 2) + rank
    graph = torch.compile(mixed, backend="aot_eager", fullgraph=True)
    assert torch.equal(graph(x), mixed(x))

    def in_place(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        dist.all_reduce(y)
        return y * 3

    other = torch.compile(in_place, backend="aot_eager", fullgraph=True)
    return [graph(x), other(x)]
