"""SyncBatchNorm in place of BatchNorm1d, by a function that goes through a model, as scripts have it.
Ends with the outputs, gradients and running values of the whole batch."""

import torch
import torch.nn as nn

import horovod.torch as hvd


def convert(module):
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        new = hvd.SyncBatchNorm(module.num_features, module.eps, module.momentum, module.affine)
        new.load_state_dict(module.state_dict())
        return new.to(module.weight.dtype)
    for name, child in module.named_children():
        setattr(module, name, convert(child))
    return module


def make():
    torch.manual_seed(14)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()


hvd.init()
torch.set_num_threads(1)
x = torch.randn(5 * hvd.size(), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
model, alone = convert(make()), make()
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
plain = torch.optim.SGD(alone.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(x[hvd.rank() * 5 : (hvd.rank() + 1) * 5]).square().mean().backward()
    optimizer.step()
    plain.zero_grad()
    alone(x).square().mean().backward()
    plain.step()
for (name, ours), theirs in zip(model.state_dict().items(), alone.state_dict().values()):
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}")
