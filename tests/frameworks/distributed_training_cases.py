# Training on top of torch.distributed: a few real steps of each kind of parallelism, on any backend.
# Touches torch.distributed as users see it.
"""Each case gives losses and parameters after its steps."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_job import case, close
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

STEPS = 4


def model_of(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 8, generator=generator), torch.randn(6, 4, generator=generator)


def steps(model: nn.Module, optimizer: Any, rank: int, count: int = STEPS) -> list[Any]:
    losses = []
    for step in range(count):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def whole(model: nn.Module) -> list[torch.Tensor]:
    found = [param.detach() for param in model.parameters()]
    return [(param.full_tensor() if isinstance(param, DTensor) else param).clone() for param in found]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@close
def ddp(rank: int, size: int) -> Any:
    found: list[Any] = []
    for options in ({}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}, {"static_graph": True}):
        model = DistributedDataParallel(model_of(rank), **options)
        found += [steps(model, sgd(model), rank), whole(model)]
    return found


@close
def ddp_without_sync(rank: int, size: int) -> Any:
    model = DistributedDataParallel(model_of())
    optimizer = sgd(model)
    for step in range(6):
        x, y = batch(rank, step)
        with model.no_sync() if step % 3 else contextlib.nullcontext():
            nn.functional.mse_loss(model(x), y).backward()
        if step % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return whole(model)


@close
def ddp_uneven(rank: int, size: int) -> Any:
    model = DistributedDataParallel(model_of())
    optimizer = sgd(model)
    with model.join():
        steps(model, optimizer, rank, 2 + 2 * rank)
    return whole(model)


@close
def ddp_unused(rank: int, size: int) -> Any:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.left, self.right = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.left(x) if rank % 2 else self.right(x)

    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    return [steps(model, sgd(model), rank), whole(model)]


@close
def ddp_hooks(rank: int, size: int) -> Any:
    found: list[Any] = []
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        model = DistributedDataParallel(model_of())
        model.register_comm_hook(dist.group.WORLD, hook)
        found += [steps(model, sgd(model), rank), whole(model)]
    model = DistributedDataParallel(model_of())
    state = powerSGD_hook.PowerSGDState(dist.group.WORLD, 1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    found += [steps(model, sgd(model), rank), whole(model)]
    return found


@close
def zero_optimizer(rank: int, size: int) -> Any:
    model = DistributedDataParallel(model_of())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    return [steps(model, optimizer, rank), whole(model)]


@close
def fsdp(rank: int, size: int) -> Any:
    found: list[Any] = []
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for options in ({}, {"reshard_after_forward": False}, {"mp_policy": mixed}):
        model = model_of()
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, **options)
        fully_shard(model, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = steps(model, optimizer, rank)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        found += [losses, whole(model), norm.full_tensor() if isinstance(norm, DTensor) else norm]
    return found


@close
def tensor_parallel(rank: int, size: int) -> Any:
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 6 * size), nn.ReLU(), nn.Linear(6 * size, 4))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return [steps(model, torch.optim.SGD(model.parameters(), lr=0.1), 0), whole(model)]


@close
def dtensors(rank: int, size: int) -> Any:
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(4)
    one, two = torch.randn(4 * size, 6), torch.randn(6, 5 * size)
    left, right = distribute_tensor(one, mesh, [Shard(0)]), distribute_tensor(two, mesh, [Shard(1)])
    product: Any = left @ right.redistribute(mesh, [Replicate()])
    moved = product.redistribute(mesh, [Shard(1)])
    return [product.full_tensor(), moved.to_local(), moved.full_tensor(), product.sum().full_tensor()]


@case
def metrics(rank: int, size: int) -> Any:
    torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
    accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=4, average="micro")
    mean, everything = torchmetrics.MeanMetric(), torchmetrics.CatMetric()
    for step in range(3):
        x, y = batch(rank, step)
        accuracy.update(x[:, :4].argmax(1), y.argmax(1))
        mean.update(torch.tensor(float(rank + step)))
        everything.update(torch.arange(rank + 1))
    return [accuracy.compute(), mean.compute(), everything.compute()]
