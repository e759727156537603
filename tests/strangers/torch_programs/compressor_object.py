"""A compressor that is an object with a state, not a class, and code that reads the optimizer's own attributes.
Ends with the averages of the rounded gradients."""

import torch

import horovod.torch as hvd


class Rounding:
    """Sends multiples of a step, and counts what it was asked."""

    def __init__(self, step):
        self.step, self.compressed, self.decompressed = step, 0, 0

    def compress(self, tensor):
        self.compressed += 1
        return torch.round(tensor / self.step), self.step

    def decompress(self, tensor, ctx):
        self.decompressed += 1
        return tensor * ctx


def make():
    torch.manual_seed(8)
    return torch.nn.Linear(3, 2).double()


def x_of(who, step):
    return torch.full((2, 3), 1.0 + step + who, dtype=torch.float64)


hvd.init()
torch.set_num_threads(1)
model, rounding = make(), Rounding(0.125)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=rounding)
assert optimizer._compression is rounding and optimizer.op == hvd.Average
assert optimizer._parameter_names == {p: name for name, p in model.named_parameters()}
assert optimizer.gradient_predivide_factor == 1.0 and optimizer.process_set is hvd.global_process_set
for step in range(3):
    optimizer.zero_grad()
    model(x_of(hvd.rank(), step)).square().mean().backward()
    optimizer.step()
count = 6 if hvd.size() > 1 else 0  # two parameters, three steps
assert (rounding.compressed, rounding.decompressed) == (count, count)

alone = make()
for step in range(3):
    total = [torch.zeros_like(p) for p in alone.parameters()]
    for who in range(hvd.size()):
        alone.zero_grad()
        alone(x_of(who, step)).square().mean().backward()
        for place, p in zip(total, alone.parameters()):
            place += torch.round(p.grad / 0.125) * 0.125 / hvd.size()
    with torch.no_grad():
        for p, grad in zip(alone.parameters(), total):
            p -= 0.01 * grad
for ours, expected in zip(model.parameters(), alone.parameters()):
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)
