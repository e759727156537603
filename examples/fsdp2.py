"""FSDP2: every rank holds a share of the parameters, the gradients and the optimizer's state.
Run: farandole run -np 2 python examples/fsdp2.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("farandole")
torch.manual_seed(1)
model = nn.Sequential(nn.Embedding(512, 128), *[nn.TransformerEncoderLayer(128, 4, 256) for _ in range(4)])
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

whole = sum(param.numel() for param in model.parameters())
mine = sum(param.to_local().numel() for param in model.parameters())
torch.manual_seed(dist.get_rank())
for step in range(10):
    tokens = torch.randint(0, 512, (16, 8))
    loss = nn.functional.mse_loss(model(tokens), torch.zeros(16, 8, 128))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0 and step % 3 == 0:
        print(f"step {step}: loss {loss.item():.4f}; this rank holds {mine} of {whole} parameters", flush=True)
dist.destroy_process_group()
