"""Schedulers of torch over a distributed optimizer, its state saved and loaded into a fresh one, add_param_group.
Ends with learning rates and weights of a run that was never interrupted."""

import io

import torch

import horovod.torch as hvd

hvd.init()
torch.set_num_threads(1)


def make(distributed):
    torch.manual_seed(21)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    if distributed:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    return model, optimizer, warmup


def step(model, optimizer, warmup, ranks, number):
    optimizer.zero_grad()
    for rank in ranks:
        x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * number + rank))
        (model(x).square().mean() / len(ranks)).backward()
    optimizer.step()
    warmup.step()


parts = make(True)
for number in range(3):
    step(*parts, [hvd.rank()], number)
buffer = io.BytesIO()
if hvd.rank() == 0:
    torch.save([part.state_dict() for part in parts], buffer)
saved = torch.load(io.BytesIO(hvd.broadcast_object(buffer.getvalue())), weights_only=True)
parts = make(True)
for part, state in zip(parts, saved):
    part.load_state_dict(state)
for number in range(3, 6):
    step(*parts, [hvd.rank()], number)

alone = make(False)
for number in range(6):
    step(*alone, range(hvd.size()), number)
assert parts[1].param_groups[0]["lr"] == alone[1].param_groups[0]["lr"] == 0.02
for ours, theirs in zip(parts[0].parameters(), alone[0].parameters()):
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)
