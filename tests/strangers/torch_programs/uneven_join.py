"""Ranks with different numbers of batches: those that are done call join(); the others go on.
Ends with gradients to which the absent ranks gave zero, and with the last rank's number on all."""

import torch

import horovod.torch as hvd

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(0)
batches = [2 + rank for rank in range(hvd.size())]
model = torch.nn.Linear(3, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def x_of(rank, step):
    return torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * rank + step))


for step in range(batches[hvd.rank()]):
    optimizer.zero_grad()
    model(x_of(hvd.rank(), step)).square().mean().backward()
    optimizer.step()
last = hvd.join()
assert last == hvd.size() - 1, last
hvd.broadcast_parameters(model.state_dict(), root_rank=last)  # the one who has seen every step

torch.manual_seed(0)
alone = torch.nn.Linear(3, 1).double()
plain = torch.optim.SGD(alone.parameters(), lr=0.1)
for step in range(max(batches)):
    plain.zero_grad()
    for rank in range(hvd.size()):
        if step < batches[rank]:
            (alone(x_of(rank, step)).square().mean() / hvd.size()).backward()
    plain.step()
for ours, theirs in zip(model.parameters(), alone.parameters()):
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
