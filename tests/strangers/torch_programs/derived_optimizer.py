"""A fork of DistributedOptimizer as research code has it: a class made from _DistributedOptimizer's own dictionary.
Ends with the averages that DistributedOptimizer itself gives."""

import torch

import horovod.torch as hvd
from horovod.torch.compression import Compression
from horovod.torch.optimizer import _DistributedOptimizer


class _Counting(_DistributedOptimizer):
    """Counts its steps and scales what comes out of synchronize()."""

    def synchronize(self):
        super().synchronize()
        self.synchronized = getattr(self, "synchronized", 0) + 1


def MyDistributedOptimizer(optimizer, named_parameters=None, compression=Compression.none):
    cls = type(optimizer.__class__.__name__, (_Counting, optimizer.__class__), {})
    return cls(optimizer.param_groups, named_parameters, compression, 1, hvd.Average)


def make():
    torch.manual_seed(6)
    return torch.nn.Linear(3, 2).double()


hvd.init()
torch.set_num_threads(1)
model = make()
optimizer = MyDistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
assert isinstance(optimizer, torch.optim.SGD) and isinstance(optimizer, _DistributedOptimizer)
for step in range(3):
    optimizer.zero_grad()
    model(torch.full((2, 3), 1.0 + step + hvd.rank(), dtype=torch.float64)).square().sum().backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
assert optimizer.synchronized == 3

alone = make()
plain = torch.optim.SGD(alone.parameters(), lr=0.1)
for step in range(3):
    plain.zero_grad()
    for rank in range(hvd.size()):
        x = torch.full((2, 3), 1.0 + step + rank, dtype=torch.float64)
        (alone(x).square().sum() / hvd.size()).backward()
    plain.step()
for ours, theirs in zip(model.parameters(), alone.parameters()):
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
