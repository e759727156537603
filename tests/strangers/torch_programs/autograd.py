"""Gradients through collectives: contrastive learning gathers features of all ranks, a pipeline broadcasts.
Ends with the gradients of one process."""

import torch
import torch.nn.functional as F

import horovod.torch as hvd

hvd.init()
torch.set_num_threads(1)
size, rank = hvd.size(), hvd.rank()


def features(who):
    return torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(who))


def contrastive(z):
    z = F.normalize(z, dim=1)
    return F.cross_entropy(z @ z.t() / 0.5, torch.arange(len(z)))


class GatherLayer(torch.autograd.Function):
    """The features of all ranks; only this rank's part gets a gradient, as many packages have it."""

    @staticmethod
    def forward(ctx, x):
        ctx.rows = len(x)
        return hvd.allgather(x.contiguous())

    @staticmethod
    def backward(ctx, grad):
        grad = hvd.allreduce(grad.contiguous(), op=hvd.Sum)
        return grad[rank * ctx.rows : (rank + 1) * ctx.rows]


whole = torch.cat([features(who) for who in range(size)]).requires_grad_()
contrastive(whole).backward()

own = features(rank).requires_grad_()
contrastive(GatherLayer.apply(own)).backward()
torch.testing.assert_close(own.grad, size * whole.grad[3 * rank : 3 * rank + 3])

own = features(rank).requires_grad_()
contrastive(hvd.allgather(own, name="features")).backward()  # averaged, as Horovod does it
torch.testing.assert_close(own.grad, whole.grad[3 * rank : 3 * rank + 3])

x = torch.full((2,), rank + 1.0, requires_grad=True)
(hvd.allreduce(x, op=hvd.Sum) * (rank + 1.0)).sum().backward()
assert x.grad.tolist() == [size * (size + 1) / 2] * 2
x = torch.full((2,), rank + 1.0, requires_grad=True)
y = hvd.broadcast(x, root_rank=0)
y.sum().backward()
assert y.tolist() == [1.0, 1.0] and x.grad.tolist() == ([1.0, 1.0] if rank == 0 else [0.0, 0.0])
x = torch.arange(2.0 * size, requires_grad=True)
hvd.reducescatter(x, op=hvd.Sum).sum().backward()
assert x.grad.tolist() == [float(size)] * (2 * size)
a, b = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
one, two = hvd.grouped_allreduce([a, b], op=hvd.Average)
(one.sum() + 2 * two.sum()).backward()
assert a.grad.tolist() == [1.0] * 2 and b.grad.tolist() == [2.0] * 3
