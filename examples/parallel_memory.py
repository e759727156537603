"""What a rank holds after a step of AdamW, by kind of parallelism: the table of docs/parallelism.md.
Run: farandole run -np 4 python examples/parallel_memory.py"""

import farandole.torch as hvd
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, LAYERS = 1024, 8
dist.init_process_group("farandole")
hvd.init()
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size,))


def layers(first=0, last=LAYERS):
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(first, last)])


def megabytes(tensors):
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in local) / 1e6


def held(model, optimizer):
    params = list(model.parameters())
    grads = [param.grad for param in params if param.grad is not None]
    state = [value for items in optimizer.state.values() for value in items.values() if torch.is_tensor(value)]
    return [megabytes(params), megabytes(grads), megabytes(state)]


def step(model, optimizer=None):
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    model(torch.randn(4, WIDTH)).sum().backward()
    optimizer.step()
    return held(model, optimizer)


def ddp():
    return step(nn.parallel.DistributedDataParallel(layers()))


def sharded_state():
    model = layers()
    return step(model, hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters()), shard_optimizer_state=True))


def fsdp(model=None, over=mesh):
    model = model or layers()
    for layer in model:
        fully_shard(layer, mesh=over)
    fully_shard(model, mesh=over)
    return step(model)


def divided(over):
    plan = {str(at): RowwiseParallel() if at % 2 else ColwiseParallel() for at in range(LAYERS)}
    return parallelize_module(layers(), over, plan)


def pipeline():
    each = LAYERS // size
    return step(layers(rank * each, rank * each + each))


kinds = {
    "DDP, or hvd.DistributedOptimizer": ddp,
    "hvd.DistributedOptimizer(shard_optimizer_state=True)": sharded_state,
    "FSDP2": fsdp,
    "tensor parallel": lambda: step(divided(mesh)),
    "pipeline": pipeline,
}
if size % 2 == 0 and size > 2:
    two = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
    kinds[f"HSDP, {size // 2} x 2"] = lambda: fsdp(over=two)
    kinds[f"FSDP2 x tensor parallel, {size // 2} x 2"] = lambda: fsdp(divided(two["tensor"]), two["data"])
for name, run in kinds.items():
    parts = run()
    if rank == 0:
        print(f"| {name} | " + " | ".join(f"{part:.1f}" for part in [*parts, sum(parts)]) + " |", flush=True)
dist.destroy_process_group()
