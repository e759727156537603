"""Tensor parallelism: each layer's matrices are divided among the ranks, which work on the same batch.
Run: farandole run -np 2 python examples/tensor_parallel.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("farandole")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(1)  # the same on all ranks: they see the same batches
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for step in range(10):
    x = torch.randn(32, 64)
    loss = nn.functional.mse_loss(model(x), x.sin())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0 and step % 3 == 0:
        shape = tuple(model[0].weight.to_local().shape)
        print(f"step {step}: loss {loss.item():.4f}; this rank holds {shape} of the first matrix", flush=True)
dist.destroy_process_group()
