"""A scaler, clipping after unscale_, and accumulation over two backward passes.
Ends with skipped steps where one rank overflowed, and equal scales and weights everywhere."""

import torch

import horovod.torch as hvd

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(8)
model = torch.nn.Linear(4, 2)
alone = torch.nn.Linear(4, 2)
alone.load_state_dict(model.state_dict())
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), backward_passes_per_step=2
)
plain = torch.optim.SGD(alone.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)


def x_of(rank, step, part):
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + part)
    return torch.randn(3, 4, generator=generator)


for step in range(4):
    overflows = step == 2
    optimizer.zero_grad()
    for part in range(2):
        loss = model(x_of(hvd.rank(), step, part)).square().mean() / 2
        if overflows and hvd.rank() == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()
    if not overflows:
        plain.zero_grad()
        for rank in range(hvd.size()):
            for part in range(2):
                (alone(x_of(rank, step, part)).square().mean() / 2 / hvd.size()).backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        plain.step()
assert scaler.get_scale() == 2.0
torch.testing.assert_close(model.weight, alone.weight, rtol=1e-5, atol=1e-6)
