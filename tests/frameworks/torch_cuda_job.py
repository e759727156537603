# A rank that uses torch.distributed, DDP and sharded optimizer state on CUDA tensors; all ranks may share one GPU.
# Touches farandole.torch as users see it.
"""`python torch_cuda_job.py BACKEND`: asserts by itself, and prints what it has shown."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import farandole.torch as hvd


def model_of() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double().cuda()


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, 8, dtype=torch.float64, generator=generator).cuda()


def train(model: Any, optimizer: Any, part: slice, steps: int = 4) -> list[torch.Tensor]:
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step)[part]).square().mean().backward()
        optimizer.step()
    return [param.detach().cpu() for param in model.parameters()]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def close(first: list[torch.Tensor], other: list[torch.Tensor], what: str) -> None:
    for one, two in zip(first, other, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)
    print(what, flush=True)


def main() -> None:
    dist.init_process_group(sys.argv[1])
    rank, size = dist.get_rank(), dist.get_world_size()
    for device in ("cpu", "cuda"):
        tensor = torch.full((1000,), rank + 1.0, device=device)
        dist.all_reduce(tensor)
        assert tensor.unique().tolist() == [size * (size + 1) / 2], (device, tensor)
        print("all_reduce on", device, flush=True)
        gathered = [torch.empty(3, device=device) for _ in range(size)]
        dist.all_gather(gathered, torch.full((3,), float(rank), device=device))
        assert [float(part.sum()) for part in gathered] == [3.0 * other for other in range(size)]
    plain = model_of()
    wanted = train(plain, adam(plain), slice(None))
    part = slice(rank * 12 // size, (rank + 1) * 12 // size)
    model: Any = nn.parallel.DistributedDataParallel(model_of())
    close(train(model, adam(model), part), wanted, "DDP")
    hvd.init()
    model = nn.parallel.DistributedDataParallel(model_of())
    model.register_comm_hook(None, hvd.ddp_hook)
    close(train(model, adam(model), part), wanted, "ddp_hook")
    for sharded in (False, True):
        model = model_of()
        named = model.named_parameters()
        optimizer = hvd.DistributedOptimizer(adam(model), named, shard_optimizer_state=sharded)
        close(train(model, optimizer, part), wanted, "sharded" if sharded else "unsharded")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
