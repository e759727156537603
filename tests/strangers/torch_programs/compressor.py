"""A compressor of somebody else's: the largest elements of each gradient, sent with handles of mpi_ops from hooks; what
was left out is remembered. Ends with the sum of what the ranks sent."""

import torch

import horovod.torch as hvd
from horovod.torch.mpi_ops import allgather_async, poll, rank, size, synchronize


class TopK:
    def __init__(self, ratio):
        self.ratio, self.residuals = ratio, {}

    def compress(self, tensor, name):
        flat = tensor.reshape(-1) + self.residuals.get(name, 0.0)
        k = max(1, int(flat.numel() * self.ratio))
        _, indices = flat.abs().topk(k, sorted=False)
        values = flat[indices]
        left = flat.clone()
        left[indices] = 0.0
        self.residuals[name] = left
        return (values, indices), (tensor.numel(), tensor.shape)

    def decompress(self, parts, ctx):
        values, indices = parts
        numel, shape = ctx
        out = torch.zeros(numel, dtype=values.dtype)
        out.index_add_(0, indices, values)
        return (out / size()).view(shape)


class Allgather:
    def __init__(self, compressor):
        self.compressor = compressor

    def send_step(self, tensor, name):
        parts, ctx = self.compressor.compress(tensor, name)
        return [allgather_async(part, name + str(i)) for i, part in enumerate(parts)], ctx

    def receive_step(self, handles, ctx):
        polls = [poll(handle) for handle in handles]
        assert all(isinstance(done, bool) for done in polls)
        return self.compressor.decompress([synchronize(handle) for handle in handles], ctx)


hvd.init()
torch.set_num_threads(1)
torch.manual_seed(4)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
start = [p.detach().clone() for p in model.parameters()]
names = {p: n for n, p in model.named_parameters()}
compressors = TopK(0.3)
memory, handles = Allgather(compressors), {}


def x_of(who, step):
    return torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(31 * step + who))


def hook(p):
    handles[p] = memory.send_step(p.grad, names[p])


for p in model.parameters():
    p.register_post_accumulate_grad_hook(hook)
for step in range(3):
    model.zero_grad()
    model(x_of(rank(), step)).square().mean().backward()
    with torch.no_grad():
        for p, (handle, ctx) in handles.items():
            p -= 0.1 * memory.receive_step(handle, ctx)
    handles.clear()

alone = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
for p, value in zip(alone.parameters(), start):
    p.data.copy_(value)
theirs = [TopK(0.3) for _ in range(size())]
for step in range(3):
    total = [torch.zeros_like(p) for p in alone.parameters()]
    for who in range(size()):
        alone.zero_grad()
        alone(x_of(who, step)).square().mean().backward()
        for i, p in enumerate(alone.parameters()):
            total[i] += theirs[who].decompress(*theirs[who].compress(p.grad, str(i)))
    with torch.no_grad():
        for p, grad in zip(alone.parameters(), total):
            p -= 0.1 * grad
for ours, expected in zip(model.parameters(), alone.parameters()):
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)
