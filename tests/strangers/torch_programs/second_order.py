"""A preconditioner beside the optimizer: it averages its factors with handles of its own; each rank inverts some.
synchronize() first, then the preconditioner changes gradients, then step() under skip_synchronize()."""

import torch
import torch.nn as nn

import horovod.torch as hvd


class Preconditioner(torch.optim.Optimizer):
    """Kronecker factors of linear layers, as second-order packages have them."""

    def __init__(self, model, damping=0.1, distributed=True):
        super().__init__(list(model.parameters()), {"lr": 0.0, "damping": damping})
        self.distributed, self.damping = distributed, damping
        self.layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
        self.a, self.g, self.inverses = {}, {}, {}
        for layer in self.layers:
            layer.register_forward_pre_hook(self._input)
            layer.register_full_backward_hook(self._output)

    def _input(self, layer, inputs):
        x = inputs[0].detach()
        self.a[layer] = self.a.get(layer, 0) + x.t() @ x / len(x)

    def _output(self, layer, _, outputs):
        g = outputs[0].detach()
        self.g[layer] = self.g.get(layer, 0) + g.t() @ g * len(g)

    def average(self, among=1):
        handles = []
        for i, layer in enumerate(self.layers):
            self.a[layer], self.g[layer] = self.a[layer] / among, self.g[layer] / among
            if self.distributed and hvd.size() > 1:
                handles.append(hvd.allreduce_async_(self.a[layer], name="factor.a.%d" % i, op=hvd.Average))
                handles.append(hvd.allreduce_async_(self.g[layer], name="factor.g.%d" % i, op=hvd.Average))
        for handle in handles:
            hvd.synchronize(handle)

    def invert(self):
        handles = []
        for i, layer in enumerate(self.layers):
            owner = i % hvd.size() if self.distributed else 0
            for which, factor in (("a", self.a[layer]), ("g", self.g[layer])):
                if not self.distributed or hvd.rank() == owner:
                    inverse = torch.linalg.inv(
                        factor + self.damping * torch.eye(len(factor), dtype=factor.dtype)
                    ).contiguous()
                else:
                    inverse = torch.empty_like(factor)
                self.inverses[layer, which] = inverse
                if self.distributed:
                    handles.append(hvd.broadcast_async_(inverse, owner, name="inverse.%s.%d" % (which, i)))
        for handle in handles:
            hvd.synchronize(handle)

    def step(self, closure=None, among=1):
        self.average(among)
        self.invert()
        for layer in self.layers:
            layer.weight.grad.copy_(self.inverses[layer, "g"] @ layer.weight.grad @ self.inverses[layer, "a"])
        self.a, self.g = {}, {}


def make():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def x_of(rank, step):
    return torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(50 * step + rank))


hvd.init()
torch.set_num_threads(1)
model = make()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
preconditioner = Preconditioner(model)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Average)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
for step in range(3):
    optimizer.zero_grad()
    model(x_of(hvd.rank(), step)).square().mean().backward()
    optimizer.synchronize()
    preconditioner.step()
    with optimizer.skip_synchronize():
        optimizer.step()

alone = make()
plain, its = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9), Preconditioner(alone, distributed=False)
for step in range(3):
    plain.zero_grad()
    grads = None
    for rank in range(hvd.size()):
        plain.zero_grad()
        alone(x_of(rank, step)).square().mean().backward()
        own = [p.grad / hvd.size() for p in alone.parameters()]
        grads = own if grads is None else [a + b for a, b in zip(grads, own)]
    for p, grad in zip(alone.parameters(), grads):
        p.grad = grad
    its.step(among=hvd.size())
    plain.step()
for ours, theirs in zip(model.parameters(), alone.parameters()):
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)
