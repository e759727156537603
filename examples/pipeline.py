"""Pipeline parallelism: each rank has some of the layers, and micro-batches move through them one after the other.
Run: farandole run -np 2 python examples/pipeline.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("farandole")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(2 * size)]
part = nn.Sequential(*layers[2 * rank : 2 * rank + 2])
stage = PipelineStage(part, rank, size, torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=2 * size, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.SGD(part.parameters(), lr=0.5)

for step in range(10):
    x = torch.randn(16 * size, 64)  # the same on all ranks; the first one feeds it, the last one compares
    losses = []
    optimizer.zero_grad()
    if rank == 0:
        schedule.step(x)
    elif rank == size - 1:
        schedule.step(target=x.tanh(), losses=losses)
    else:
        schedule.step()
    optimizer.step()
    if losses and step % 3 == 0:
        print(f"step {step}: loss {torch.stack(losses).mean().item():.4f}", flush=True)
dist.destroy_process_group()
