"""Two dimensions: tensor parallelism inside pairs of ranks, FSDP2 across the pairs.
Run: farandole run -np 4 python examples/hybrid.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("farandole")
mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))
parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(model, mesh=mesh["data"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

torch.manual_seed(mesh["data"].get_local_rank())  # ranks of one pair see the same batch
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
