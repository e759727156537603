"""Ranks in a grid: layers divided over one direction, data over the other, each direction a process set of its own.
Ends with the weights of one process."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import horovod.torch as hvd

hvd.init(process_sets="dynamic")
r, n = hvd.rank(), hvd.size()
torch.set_num_threads(1)
tp = 2 if n % 2 == 0 else 1
dp = n // tp


def set_of(ranks):  # a second set of all ranks is refused
    return hvd.add_process_set(ranks) if len(ranks) < n else hvd.global_process_set


tensor_sets = [set_of(range(i * tp, (i + 1) * tp)) for i in range(dp)]
data_sets = [set_of([i * tp + j for i in range(dp)]) for j in range(tp)]
mine_t = tensor_sets[r // tp]
mine_d = data_sets[r % tp]
assert mine_t.included() and mine_t.size() == tp and mine_t.rank() == r % tp


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        return hvd.allreduce(g.contiguous(), op=hvd.Sum, process_set=mine_t)


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return hvd.allreduce(x.contiguous(), op=hvd.Sum, process_set=mine_t)

    @staticmethod
    def backward(ctx, g):
        return g


torch.manual_seed(0)
W1 = torch.randn(8, 4, dtype=torch.double)
W2 = torch.randn(3, 8, dtype=torch.double)
k = mine_t.rank()


class TP(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(W1.chunk(tp, 0)[k].clone())
        self.b = nn.Parameter(W2.chunk(tp, 1)[k].clone())

    def forward(self, x):
        return Reduce.apply(F.linear(torch.tanh(F.linear(Copy.apply(x), self.a)), self.b))


m = TP()
o = hvd.DistributedOptimizer(
    torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), named_parameters=m.named_parameters(), process_set=mine_d
)
X = torch.randn(dp, 5, 4, dtype=torch.double)
for _ in range(3):
    o.zero_grad()
    m(X[r // tp]).pow(2).mean().backward()
    o.step()
a = nn.Parameter(W1.clone())
b = nn.Parameter(W2.clone())
p = torch.optim.SGD([a, b], lr=0.1, momentum=0.9)
for _ in range(3):
    p.zero_grad()
    for i in range(dp):
        (F.linear(torch.tanh(F.linear(X[i], a)), b).pow(2).mean() / dp).backward()
    p.step()
torch.testing.assert_close(m.a.data, a.data.chunk(tp, 0)[k])
torch.testing.assert_close(m.b.data, b.data.chunk(tp, 1)[k])
full = hvd.allgather(m.a.detach(), process_set=mine_t)
torch.testing.assert_close(full, a.data)
assert hvd.broadcast_object({"r": r}, root_rank=mine_t.ranks[0], process_set=mine_t) == {"r": mine_t.ranks[0]}
for s in {id(s): s for s in tensor_sets + data_sets}.values():
    assert hvd.remove_process_set(s) == (s is not hvd.global_process_set)
