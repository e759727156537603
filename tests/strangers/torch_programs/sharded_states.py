"""A share of the optimizer's state per rank, made by hand: reducescatter of the gradient, allgather of the weights.
Ends with Adam's weights of one process."""

import torch

import horovod.torch as hvd

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(3)
size, rank = hvd.size(), hvd.rank()
rows = 4 * size + 1  # not divisible: the first rank has a row more
weight = torch.randn(rows, 3, dtype=torch.float64)
alone = weight.clone().requires_grad_()
shares = [rows // size + (r < rows % size) for r in range(size)]
start = sum(shares[:rank])
mine = weight[start : start + shares[rank]].clone().requires_grad_()
optimizer = torch.optim.Adam([mine], lr=0.1)
plain = torch.optim.Adam([alone], lr=0.1)


def loss_of(w, who, step):
    x = torch.randn(2, rows, dtype=torch.float64, generator=torch.Generator().manual_seed(17 * step + who))
    return (x @ w).square().mean()


for step in range(3):
    full = hvd.allgather(mine.detach(), name="weights").requires_grad_()
    loss_of(full, rank, step).backward()
    mine.grad = hvd.reducescatter(full.grad, name="gradient", op=hvd.Average)
    assert mine.grad.shape == mine.shape
    optimizer.step()
    plain.zero_grad()
    for who in range(size):
        (loss_of(alone, who, step) / size).backward()
    plain.step()
torch.testing.assert_close(hvd.allgather(mine.detach()), alone.detach(), rtol=1e-9, atol=1e-9)

parts = hvd.grouped_reducescatter([torch.ones(size, 2), torch.full((2 * size,), 2.0)], op=hvd.Sum)
assert parts[0].tolist() == [[size] * 2] and parts[1].tolist() == [2.0 * size] * 2
